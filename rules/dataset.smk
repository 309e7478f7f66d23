# target, prompts, responses, packed rows
TARGET = str(flow.target_folder)
CONVERSATIONS = str(flow.conversations_folder)
DATASET = str(flow.dataset_folder)
DATASET_PYTHON = str(flow.dataset_environment.python)


if flow.target_package:

    rule install_target_package:
        input:
            lock=str(flow.target_package_lock),
            code=code("environment.package"),
        output:
            package=directory(f"{TARGET}/package"),
            record=f"{TARGET}/package.json",
        log:
            log_of(f"{TARGET}/package"),
        benchmark:
            benchmark_of(f"{TARGET}/package")
        retries: 0
        localrule: True
        params:
            python=lambda wildcards, input: sys.executable,
        shell:
            "PYTHONPATH=$DRAFTFLOW_SRC${{PYTHONPATH:+:$PYTHONPATH}} {params.python:q} -m draftflow.environment.package"
            " --lock {input.lock:q} --output {output.package:q} --record {output.record:q} 2>&1 | logged {log:q}"


rule prepare_target:
    input:
        package=(
            rules.install_target_package.output.package if flow.target_package else []
        ),
        python=DATASET_PYTHON,
        code=code("target.prepare"),
    output:
        description=f"{TARGET}/target.json",
        tokenizer=directory(f"{TARGET}/tokenizer"),
    log:
        log_of(f"{TARGET}/prepare"),
    benchmark:
        benchmark_of(f"{TARGET}/prepare")
    retries: 0
    localrule: True
    params:
        settings=as_json(flow.config.target.model_dump(mode="json")),
        package=lambda wildcards, input: (
            f"--package {input.package}" if input.package else ""
        ),
        folder=TARGET,
    shell:
        "{input.python:q} -m draftflow.target.prepare --settings {params.settings:q} {params.package}"
        " --output {params.folder:q} 2>&1 | logged {log:q}"


rule read_conversations:
    input:
        sources=[str(source) for source in flow.sources],
        python=DATASET_PYTHON,
        code=code("dataset.read"),
    output:
        conversations=f"{CONVERSATIONS}/conversations.jsonl",
        record=f"{CONVERSATIONS}/conversations.json",
    log:
        log_of(f"{CONVERSATIONS}/conversations"),
    benchmark:
        benchmark_of(f"{CONVERSATIONS}/conversations")
    retries: 0
    params:
        settings=as_json({"responses": flow.config.dataset.responses}),
    shell:
        "{input.python:q} -m draftflow.dataset.read --settings {params.settings:q}"
        " --output {output.conversations:q} --record {output.record:q} {input.sources:q} 2>&1 | logged {log:q}"


if flow.regenerates:

    rule regenerate_responses:
        input:
            conversations=rules.read_conversations.output.conversations,
            target=rules.prepare_target.output.description,
            python=str(flow.response_environment.python),
            code=code("dataset.regenerate"),
        output:
            responses=f"{CONVERSATIONS}/responses.jsonl",
            record=f"{CONVERSATIONS}/responses.json",
        log:
            log_of(f"{CONVERSATIONS}/responses"),
        benchmark:
            benchmark_of(f"{CONVERSATIONS}/responses")
        threads: cores(1)
        resources:
            **flow.resources(min(1, flow.devices.gpus)),
        params:
            settings=as_json(
                flow.config.dataset.regenerate.model_dump(
                    mode="json", exclude={"torch"}
                )
            ),
            device=flow.devices.kind,
            device_variables=on_first_device(),
            target=TARGET,
        shell:
            "{params.device_variables} {input.python:q} -m draftflow.dataset.regenerate --settings {params.settings:q} --device {params.device}"
            " --target {params.target:q} --conversations {input.conversations:q}"
            " --output {output.responses:q} --record {output.record:q} 2>&1 | logged {log:q}"


rule pack_rows:
    input:
        conversations=(
            rules.regenerate_responses.output.responses
            if flow.regenerates
            else rules.read_conversations.output.conversations
        ),
        target=rules.prepare_target.output.description,
        python=DATASET_PYTHON,
        code=code("dataset.pack"),
    output:
        rows=f"{DATASET}/rows.safetensors",
        held_out=f"{DATASET}/held_out.jsonl",
        record=f"{DATASET}/pack.json",
    log:
        log_of(f"{DATASET}/pack"),
    benchmark:
        benchmark_of(f"{DATASET}/pack")
    retries: 0
    params:
        settings=as_json(
            flow.config.dataset.model_dump(
                mode="json", include={"row_length", "held_out", "seed"}
            )
        ),
        target=TARGET,
    shell:
        "{input.python:q} -m draftflow.dataset.pack --settings {params.settings:q} --target {params.target:q}"
        " --conversations {input.conversations:q} --output {output.rows:q} --held-out {output.held_out:q}"
        " --record {output.record:q} 2>&1 | logged {log:q}"
