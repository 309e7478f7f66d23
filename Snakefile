# draftflow: from a target model, prompts and a choice of torch build to a checked DFlash drafter.
#
#   results/environments/<env_id>/               venv/ install.json fingerprint.json, environment.tar where nodes copy it
#   results/targets/<target_id>/                 tokenizer/ target.json
#   results/conversations/<conversations_id>/    conversations.jsonl, responses.jsonl where the target writes them
#   results/datasets/<dataset_id>/               rows.safetensors held_out.jsonl
#   results/compile-cache/<env_id>/<device kind>/  what is compiled, and <step>/warm.json
#   results/runs/<run>/<env_id>/                 train.json metrics.jsonl checkpoints/ drafter/ checks/ checks.json
#   results/probe/                               <host>.json comparison.tsv
#   logs/                                        the same stems, .log and .benchmark.tsv
#
# env_id, target_id and dataset_id are known when this file is parsed: another torch build is another subtree,
# the old one stays, and no dataset depends on it.
from snakemake.utils import min_version

min_version("9.27")


if Path("config.yaml").exists():

    configfile: "config.yaml"


include: "rules/common.smk"
include: "rules/probe.smk"


if not probing:

    include: "rules/environment.smk"
    include: "rules/dataset.smk"
    include: "rules/compile_cache.smk"
    include: "rules/training.smk"
    include: "rules/checks.smk"

    localrules:
        train,
        environment,
        dataset,
        check,

    rule train:
        default_target: True
        input:
            rules.require_checks.output,
            rules.export_drafter.output.drafter,

    rule environment:
        input:
            fingerprint(flow.environment),

    rule dataset:
        input:
            rules.pack_rows.output,

    rule check:
        input:
            rules.require_checks.output,


onstart:
    before_first_job()


# Who makes a file is known by its name. A rule that is named beside it would come along into the job on a node, whose
# Snakemake is to run its own rules alone, and would be run there if a source was edited since the job was submitted.
for known in workflow.rules:
    known.dependencies.clear()
