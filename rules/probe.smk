# probe: no output, so that it is asked anew every time
rule probe:
    log:
        "logs/probe.log",
    localrule: True
    params:
        # in the order of the configuration: the first host is what others are compared with
        settings=json.dumps(flow.config.probe.model_dump(mode="json")),
        # where no host is named: what the workflow installed, if it is there
        here=[
            str(flow.environment.python),
            *(
                [flow.config.torch.interpreter]
                if flow.config.torch.build == "external"
                else []
            ),
        ],
        python=sys.executable,
    shell:
        "PYTHONPATH=$DRAFTFLOW_SRC${{PYTHONPATH:+:$PYTHONPATH}} {params.python:q} -m draftflow.environment.hosts"
        " --settings {params.settings:q} --here {params.here:q} --output results/probe 2>&1 | logged {log:q}"
