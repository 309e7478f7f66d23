# warm_cache, bundle_cache, and of further kinds of nodes warm_kind, bundle_kind
PACKED = flow.packed


rule warm_cache:
    input:
        target=rules.prepare_target.output.description,
        fingerprint=fingerprint(flow.environment),
        python=str(flow.environment.python),
        bundle=[] if flow.bundle is None else str(flow.bundle),
        archive=archive(flow.environment),
        code=code("compile_cache.warm", "compile_cache.exercise"),
    output:
        str(flow.warm_record),
    log:
        log_of(flow.warm_record.with_suffix("")),
    benchmark:
        benchmark_of(flow.warm_record.with_suffix(""))
    threads: cores(flow.devices.per_node)
    resources:
        # all devices of the run, on one node, walked one after the other in one job: a scheduler that hands out
        # devices job by job would give the same one each time
        **flow.resources(flow.devices.gpus),
    params:
        settings=as_json(flow.step_settings),
        cache=str(flow.compile_cache),
        fresh=lambda wildcards, input: "--fresh" if forced("warm_cache") else "",
        bundle=lambda wildcards, input: (
            f"--bundle {quote(input.bundle)}" if input.bundle else ""
        ),
        target=TARGET,
    shell:
        "{on_node} {input.python:q} -m draftflow.compile_cache.warm --settings {params.settings:q}"
        " --fingerprint {input.fingerprint:q} --target {params.target:q}"
        " --cache {params.cache:q} --record {output:q} {params.fresh} {params.bundle} 2>&1 | logged {log:q}"


rule bundle_cache:
    input:
        warm=rules.warm_cache.output,
        python=str(flow.environment.python),
        code=code("compile_cache.bundle"),
    output:
        bundle=str(PACKED),
        checksum=f"{PACKED}.sha256",
    log:
        log_of(PACKED.with_name("bundle")),
    benchmark:
        benchmark_of(PACKED.with_name("bundle"))
    shell:
        "{input.python:q} -m draftflow.compile_cache.bundle pack --record {input.warm:q} --output {output.bundle:q}"
        " 2>&1 | logged {log:q}"


if flow.other_kinds:

    use rule warm_cache as warm_kind with:
        input:
            target=rules.prepare_target.output.description,
            fingerprint=of_kind(fingerprint(flow.environment), "{kind}"),
            python=str(flow.environment.python),
            bundle=[],
            archive=archive(flow.environment),
            # one kind after the first, which forces the others along
            first=rules.warm_cache.output,
            code=code("compile_cache.warm", "compile_cache.exercise"),
        output:
            of_kind(flow.warm_record, "{kind}"),
        log:
            log_of(of_kind(flow.warm_record, "{kind}").removesuffix(".json")),
        benchmark:
            benchmark_of(of_kind(flow.warm_record, "{kind}").removesuffix(".json"))
        wildcard_constraints:
            kind=OTHER_KINDS,
        resources:
            **on_kind(flow.devices.gpus),
        params:
            fresh=lambda wildcards, input: (
                "--fresh" if forced("warm_cache", "warm_kind") else ""
            ),

    use rule bundle_cache as bundle_kind with:
        input:
            warm=rules.warm_kind.output,
            python=str(flow.environment.python),
            code=code("compile_cache.bundle"),
        output:
            bundle=of_kind(PACKED, "{kind}"),
            checksum=of_kind(f"{PACKED}.sha256", "{kind}"),
        log:
            log_of(PACKED.with_name("bundle-{kind}")),
        benchmark:
            benchmark_of(PACKED.with_name("bundle-{kind}"))
        wildcard_constraints:
            kind=OTHER_KINDS,
