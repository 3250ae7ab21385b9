"""The same stages by datatrove, for benchmarks/crawl.py. Runs in an environment of its own, which has datatrove.

    python datatrove_crawl.py CRAWL_FOLDER WORK_FOLDER TOKENIZER LID_MODEL WORKERS

One task over all files when WORKERS is 1, so that what a task loads is loaded once. Extraction, filters, MinHash and
limits as its examples/fineweb.py sets them, without the URL filter (its lists are a download). Prints JSON: records,
documents kept at the end, tokens.
"""

import json
import shutil
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.io import strip_protocol
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    LanguageFilter,
)
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import JsonlReader, WarcReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.lid import FT176LID
from huggingface_hub import cached_assets_path

EXTRACTION_SECONDS = 10  # of one page at most: its default of 1 drops pages on a busy machine


def place_model(model: str) -> None:
    """The language model where datatrove looks for its download."""
    folder = Path(cached_assets_path(library_name="datatrove", namespace="lid", subfolder="ft176"))
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / strip_protocol(FT176LID.MODEL_URL).replace("/", "_")
    if not place.exists():
        shutil.copy(model, place)
        Path(f"{place}.completed").touch()


def main() -> None:
    crawl, work, tokenizer, model, workers = sys.argv[1:]
    shutil.rmtree(work, ignore_errors=True)
    place_model(model)
    count = int(workers)
    tasks = 1 if count == 1 else len(list(Path(crawl).iterdir()))
    config = MinhashConfig(
        hash_config=HashConfig(hash_fc="sha1", precision=64), num_buckets=14, hashes_per_bucket=8, n_grams=5
    )

    def run(name, pipeline, tasks):
        LocalPipelineExecutor(
            pipeline=pipeline, tasks=tasks, workers=count, logging_dir=f"{work}/logs/{name}", start_method="fork"
        ).run()

    filters = [
        Trafilatura(favour_precision=True, timeout=EXTRACTION_SECONDS),
        LanguageFilter(languages=["en"]),
        GopherRepetitionFilter(),
        GopherQualityFilter(),
        C4QualityFilter(filter_no_terminal_punct=False),
        FineWebQualityFilter(),
        PIIFormatter(),
    ]
    run("filter", [WarcReader(crawl, glob_pattern="*.warc.gz"), *filters, JsonlWriter(f"{work}/filtered")], tasks)
    run(
        "signatures",
        [JsonlReader(f"{work}/filtered"), MinhashDedupSignature(f"{work}/signatures", config=config)],
        tasks,
    )
    run("buckets", [MinhashDedupBuckets(f"{work}/signatures", f"{work}/buckets", config=config)], config.num_buckets)
    run("cluster", [MinhashDedupCluster(f"{work}/buckets", f"{work}/remove", config=config)], 1)
    dedup = [JsonlReader(f"{work}/filtered"), MinhashDedupFilter(f"{work}/remove"), JsonlWriter(f"{work}/kept")]
    run("dedup", dedup, tasks)
    tokens = DocumentTokenizer(
        f"{work}/tokens", tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>", shuffle_documents=False
    )
    run("tokens", [JsonlReader(f"{work}/kept"), tokens], tasks)
    stats = {name: json.loads(Path(f"{work}/logs/{name}/stats.json").read_text()) for name in ("filter", "tokens")}
    reader, tokenized = stats["filter"][0], stats["tokens"][-1]
    print(
        json.dumps(
            {
                "records": reader["stats"]["documents"]["total"],
                "kept": stats["tokens"][0]["stats"]["documents"]["total"],
                "tokens": tokenized["stats"]["tokens"]["total"],
            }
        )
    )


if __name__ == "__main__":
    main()
