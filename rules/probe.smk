# probe: no output, so that it is asked anew every time
def interpreters_here():
    """Where no host is named: what the workflow installed, if it is there, or the interpreter of the configuration."""
    configured = (
        [flow.config.torch.interpreter] if flow.config.torch.build == "external" else []
    )
    try:
        return [str(flow.environment.python), *configured]
    except DraftflowError:
        return configured or [sys.executable]


rule probe:
    log:
        "logs/probe.log",
    localrule: True
    params:
        # in the order of the configuration: the first host is what others are compared with
        settings=json.dumps(flow.config.probe.model_dump(mode="json")),
        here=interpreters_here(),
        python=sys.executable,
    shell:
        "PYTHONPATH=$DRAFTFLOW_SRC${{PYTHONPATH:+:$PYTHONPATH}} {params.python:q} -m draftflow.environment.hosts"
        " --settings {params.settings:q} --here {params.here:q} --output results/probe 2>&1 | logged {log:q}"
