# train_drafter, export_drafter
RUN = str(flow.run_folder)


rule train_drafter:
    input:
        rows=rules.pack_rows.output.rows,
        target=rules.prepare_target.output.description,
        fingerprint=of_all_kinds(fingerprint(flow.environment)),
        warm=of_all_kinds(flow.warm_record),
        python=str(flow.environment.python),
        archive=archive(flow.environment),
        bundle=of_all_kinds(PACKED) if NODE_LOCAL else [],
        checksum=of_all_kinds(f"{PACKED}.sha256") if NODE_LOCAL else [],
        code=code("training.train", "training.worker"),
    output:
        record=f"{RUN}/train.json",
        metrics=f"{RUN}/metrics.jsonl",
    log:
        log_of(f"{RUN}/train"),
    benchmark:
        benchmark_of(f"{RUN}/train")
    threads: cores(flow.devices.per_node)
    resources:
        **flow.resources(flow.devices.gpus, flow.devices.nodes),
    params:
        settings=as_json(flow.training_settings),
        # how, not what: another launcher is no reason to train again
        cluster=lambda wildcards, input: as_json(flow.cluster_settings),
        checkpoints=f"{RUN}/checkpoints",
        again=lambda wildcards, input: (
            "--again" if forced("train_drafter", "warm_cache") else ""
        ),
        # each node unpacks the bundle of the cache to its own disk
        local=lambda wildcards, input: (
            f"--node-local {quote(NODE_LOCAL)} --bundle {shlex.join(input.bundle)}"
            if input.bundle
            else ""
        ),
        kinds=f"--kinds {' '.join(flow.kinds)}" if flow.other_kinds else "",
        tensorboard=f"{RUN}/tensorboard",
        target=TARGET,
    shell:
        "{on_node} {input.python:q} -m draftflow.training.train --settings {params.settings:q}"
        " --fingerprint {input.fingerprint:q} --rows {input.rows:q} --target {params.target:q}"
        " --warm {input.warm:q} {params.kinds} {params.local} --checkpoints {params.checkpoints:q}"
        " --tensorboard {params.tensorboard:q} --metrics {output.metrics:q} --record {output.record:q} {params.again}"
        " --cluster {params.cluster:q}"
        " 2>&1 | logged {log:q}"


rule export_drafter:
    input:
        train=rules.train_drafter.output.record,
        target=rules.prepare_target.output.description,
        python=str(flow.environment.python),
        code=code("training.export"),
    output:
        drafter=directory(f"{RUN}/drafter"),
        record=f"{RUN}/export.json",
    log:
        log_of(f"{RUN}/export"),
    benchmark:
        benchmark_of(f"{RUN}/export")
    params:
        checkpoints=f"{RUN}/checkpoints",
        target=TARGET,
        provenance=as_json(
            {
                "env_id": flow.environment.id,
                "dataset_id": flow.dataset_id,
                "target_id": flow.target_id,
            }
        ),
    shell:
        "{input.python:q} -m draftflow.training.export --settings {params.provenance:q}"
        " --checkpoints {params.checkpoints:q} --train {input.train:q} --target {params.target:q}"
        " --output {output.drafter:q} --record {output.record:q} 2>&1 | logged {log:q}"
