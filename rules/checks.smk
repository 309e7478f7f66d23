# check_*, collect, require, plots
CHECKS = f"{RUN}/checks"


rule check_weights:
    input:
        drafter=rules.export_drafter.output.drafter,
        train=rules.train_drafter.output.record,
        rows=rules.pack_rows.output.rows,
        target=rules.prepare_target.output.description,
        warm=rules.warm_cache.output,
        python=str(flow.environment.python),
        archive=archive(flow.environment),
        code=code("checks.weights", "compile_cache.within"),
    output:
        f"{CHECKS}/weights.json",
    log:
        log_of(f"{CHECKS}/weights"),
    benchmark:
        benchmark_of(f"{CHECKS}/weights")
    resources:
        **flow.resources(min(1, flow.devices.gpus)),
    params:
        checkpoints=f"{RUN}/checkpoints",
        device_variables=on_first_device(),
        target=TARGET,
    shell:
        "{on_node} {params.device_variables} {input.python:q} -m draftflow.compile_cache.within {input.warm:q} draftflow.checks.weights"
        " --drafter {input.drafter:q} --checkpoints {params.checkpoints:q}"
        " --train {input.train:q} --rows {input.rows:q} --target {params.target:q} --record {output:q} 2>&1 | logged {log:q}"


rule check_generation:
    input:
        drafter=rules.export_drafter.output.drafter,
        held_out=rules.pack_rows.output.held_out,
        target=rules.prepare_target.output.description,
        python=str(flow.environment.python),
        archive=archive(flow.environment),
        code=code("checks.generation"),
    output:
        record=f"{CHECKS}/generation.json",
        table=f"{RUN}/acceptance.tsv",
    log:
        log_of(f"{CHECKS}/generation"),
    benchmark:
        benchmark_of(f"{CHECKS}/generation")
    threads: cores(1)
    resources:
        **flow.resources(min(1, flow.devices.gpus)),
    params:
        settings=as_json(
            flow.config.checks.model_dump(
                mode="json",
                include={"prompts", "max_new_tokens", "acceptance_floor", "compile"},
            )
        ),
        device=flow.devices.kind,
        device_variables=on_first_device(),
        target=TARGET,
    shell:
        "{on_node} {params.device_variables} {input.python:q} -m draftflow.checks.generation --settings {params.settings:q} --drafter {input.drafter:q}"
        " --target {params.target:q} --held-out {input.held_out:q} --device {params.device}"
        " --record {output.record:q} --table {output.table:q} 2>&1 | logged {log:q}"


rule check_records:
    input:
        train=rules.train_drafter.output.record,
        metrics=rules.train_drafter.output.metrics,
        warm=rules.warm_cache.output,
        python=str(flow.environment.python),
        code=code("checks.records"),
    output:
        f"{CHECKS}/records.json",
    log:
        log_of(f"{CHECKS}/records"),
    benchmark:
        benchmark_of(f"{CHECKS}/records")
    retries: 0
    params:
        settings=as_json(
            flow.config.checks.model_dump(mode="json", include={"compile"})
        ),
    shell:
        "{input.python:q} -m draftflow.checks.records --settings {params.settings:q} --train {input.train:q}"
        " --metrics {input.metrics:q} --warm {input.warm:q} --record {output:q} 2>&1 | logged {log:q}"


rule collect_checks:
    input:
        checks=[
            rules.check_weights.output[0],
            rules.check_generation.output.record,
            rules.check_records.output[0],
        ],
        fingerprint=fingerprint(flow.environment),
        python=str(flow.environment.python),
        code=code("checks.collect"),
    output:
        f"{RUN}/checks.json",
    log:
        log_of(f"{RUN}/checks"),
    benchmark:
        benchmark_of(f"{RUN}/checks")
    retries: 0
    params:
        env_id=flow.environment.id,
    shell:
        "{input.python:q} -m draftflow.checks.collect --env-id {params.env_id:q} --fingerprint {input.fingerprint:q}"
        " --output {output:q} {input.checks:q} 2>&1 | logged {log:q}"


rule plot_run:
    input:
        metrics=rules.train_drafter.output.metrics,
        acceptance=rules.check_generation.output.table,
        python=str(flow.environment.python),
        code=code("checks.plots"),
    output:
        loss=f"{RUN}/plots/loss.svg",
        acceptance=f"{RUN}/plots/acceptance.svg",
    log:
        log_of(f"{RUN}/plots"),
    benchmark:
        benchmark_of(f"{RUN}/plots")
    shell:
        "{input.python:q} -m draftflow.checks.plots --metrics {input.metrics:q} --acceptance {input.acceptance:q}"
        " --loss-plot {output.loss:q} --acceptance-plot {output.acceptance:q} 2>&1 | logged {log:q}"


# The only rule that fails when a check does: what it judges is written by rules that succeed, and so stays.
rule require_checks:
    input:
        checks=rules.collect_checks.output[0],
        plots=rules.plot_run.output,
        python=str(flow.environment.python),
        code=code("checks.verdict"),
    output:
        f"{RUN}/checks.passed",
    log:
        log_of(f"{RUN}/verdict"),
    retries: 0
    localrule: True
    shell:
        "{input.python:q} -m draftflow.checks.verdict --checks {input.checks:q} --output {output:q} 2>&1 | logged {log:q}"
