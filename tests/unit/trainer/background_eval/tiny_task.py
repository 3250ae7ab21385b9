"""A task of lm-eval in a folder of its own, which needs no network: the log-likelihood of three short texts."""

import json
from pathlib import Path

YAML = """task: nats
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
metric_list:
  - metric: perplexity
"""


def write_task(folder: Path) -> list[dict[str, str]]:
    """Write the task "nats" into `folder`. Return its examples, which have a question `q` and an answer `a`."""
    rows = [{"q": f"stone {word}", "a": f" {word} ore"} for word in ("ingot", "pour", "stamp")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "nats.yaml").write_text(YAML.format(data=folder / "rows.jsonl"))
    return rows
