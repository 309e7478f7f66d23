# lock, install, pack_environment, fingerprint, fingerprint_kind
rule lock:
    localrule: True
    params:
        settings=as_json(
            {
                "choices": [asdict(choice) for choice in flow.locked_choices],
                "index": flow.config.torch.index,
                "source": flow.config.target.source,
            }
        ),
        python=sys.executable,
        root=str(workflow.basedir),
    shell:
        "PYTHONPATH=$DRAFTFLOW_SRC${{PYTHONPATH:+:$PYTHONPATH}} {params.python:q} -m draftflow.environment.lock"
        " --settings {params.settings:q} --root {params.root:q}"


rule install:
    input:
        lock=lambda wildcards: flow.environments[wildcards.environment].lock or [],
        code=code("environment.install"),
    output:
        python="results/environments/{environment}/venv/bin/draftflow-python",
        record="results/environments/{environment}/install.json",
    log:
        "logs/environments/{environment}/install.log",
    benchmark:
        "logs/environments/{environment}/install.benchmark.tsv"
    wildcard_constraints:
        environment="[^/]+",
    retries: 0
    localrule: True
    params:
        # The lock and the identity decide what is installed; where packages come from is no reason to install
        # again, and a parameter that looks at the input is not compared.
        settings=lambda wildcards, input: as_json(
            flow.environments[wildcards.environment].settings
        ),
        lock=lambda wildcards, input: (
            f"--lock {input.lock}"
            if input.lock
            else f"--requirements {requirements(wildcards.environment)}"
        ),
        python=lambda wildcards, input: sys.executable,
        folder=lambda wildcards: f"results/environments/{wildcards.environment}",
    shell:
        "PYTHONPATH=$DRAFTFLOW_SRC${{PYTHONPATH:+:$PYTHONPATH}} {params.python:q} -m draftflow.environment.install"
        " --settings {params.settings:q} {params.lock} --folder {params.folder:q} 2>&1 | logged {log:q}"


rule pack_environment:
    input:
        python=rules.install.output.python,
        record=rules.install.output.record,
        code=code("environment.archive"),
    output:
        archive="results/environments/{environment}/environment.tar",
        checksum="results/environments/{environment}/environment.tar.sha256",
    log:
        "logs/environments/{environment}/environment.log",
    benchmark:
        "logs/environments/{environment}/environment.benchmark.tsv"
    wildcard_constraints:
        environment="[^/]+",
    localrule: True
    params:
        venv=lambda wildcards, input: str(Path(input.record).parent / "venv"),
    shell:
        "{input.python:q} -m draftflow.environment.archive --venv {params.venv:q} --output {output.archive:q}"
        " 2>&1 | logged {log:q}"


rule fingerprint:
    input:
        python=rules.install.output.python,
        record=rules.install.output.record,
        archive=lambda wildcards: archive(flow.environments[wildcards.environment]),
        code=code("environment.fingerprint"),
    output:
        "results/environments/{environment}/fingerprint.json",
    log:
        "logs/environments/{environment}/fingerprint.log",
    benchmark:
        "logs/environments/{environment}/fingerprint.benchmark.tsv"
    wildcard_constraints:
        environment="[^/]+",
    resources:
        **flow.resources(flow.devices.gpus),
    params:
        # of an environment that was fingerprinted anywhere, and now is to be on a certain kind of node
        **({"node": as_json(next(iter(flow.kinds.values())))} if flow.kinds else {}),
    shell:
        "{on_node} {input.python:q} -m draftflow.environment.fingerprint"
        " --install {input.record:q} --output {output:q} 2>&1 | logged {log:q}"


if flow.other_kinds:

    use rule fingerprint as fingerprint_kind with:
        input:
            python=rules.install.output.python,
            record=rules.install.output.record,
            archive=lambda wildcards: archive(flow.environments[wildcards.environment]),
            # so that what forces the one forces all
            first=rules.fingerprint.output,
            code=code("environment.fingerprint"),
        output:
            "results/environments/{environment}/fingerprint-{kind}.json",
        log:
            "logs/environments/{environment}/fingerprint-{kind}.log",
        benchmark:
            "logs/environments/{environment}/fingerprint-{kind}.benchmark.tsv"
        wildcard_constraints:
            environment="[^/]+",
            kind=OTHER_KINDS,
        resources:
            **on_kind(flow.devices.gpus),
        params:
            node=lambda wildcards: as_json(flow.kinds[wildcards.kind]),
