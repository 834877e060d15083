"""Row 6 of the paper's numbers: blocks that beams share, counted with a real small model.

    python -m benchmarks.paper.beams          SmolLM2, both lengths, widths 2, 4 and 6: minutes
    python -m benchmarks.paper.beams --quick  two requests of a few tokens
    ... --keep                                writes to benchmarks/results

Which beams survive depends on a model's probabilities, so no stub can stand in. Nothing here is
timed: after each step the pool's map is asked how many blocks the beams would need apart, and how
many they have. `python -m benchmarks.paper` sets the shares beside the printed ones.
"""

from __future__ import annotations

import argparse
from itertools import islice
from typing import Any

from benchmarks.common.report import first_line, save, table
from benchmarks.common.sharegpt import load_sample
from benchmarks.paper.memory import ALPACA, AT_MEANS, workloads
from benchmarks.sim import lengths
from jaxpage import LLM, BeamSearchParams, load
from jaxpage.outputs import BlockMap

WIDTHS = (2, 4, 6)
BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=8, help="by length distribution")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    args = parser.parse_args()
    config, params, tokenizer = load(args.model, dtype="float32")
    assert tokenizer is not None, "the prompts are text"
    model = {"config": config, "params": params, "tokenizer": tokenizer}
    text = [token for item in load_sample(64) for token in tokenizer.encode(item.prompt)]
    cells: list[dict[str, Any]] = []
    for dataset, name in (("Alpaca", ALPACA), ("ShareGPT", AT_MEANS)):
        jobs = lengths.at_once(workloads(5000)[name], args.requests)
        if args.quick:
            jobs = [lengths.Job(20, 4)] * 2
        for width in WIDTHS[: 1 if args.quick else None]:
            cell = counted(model, text, jobs, width)
            cells.append({"dataset": dataset, "lengths": name, "width": width, **cell})
            print(cells[-1], flush=True)
    rows = [list(cell.values()) for cell in cells]
    record = {"model": args.model, "block_size": BLOCK_SIZE, "beams": cells}
    lines = table(tuple(cells[0]), rows)
    save("paper_beams", record, lines=lines, is_quick=args.quick, keep=args.keep)


def counted(
    model: dict[str, Any], text: list[int], jobs: list[lengths.Job], width: int
) -> dict[str, Any]:
    """Percent of the blocks saved, over all steps of all requests at once, and at their peak."""
    most = max(job.prompt + job.output for job in jobs)
    apart = sum(-(-(job.prompt + job.output) // BLOCK_SIZE) for job in jobs) * width
    llm = LLM(
        **model, block_size=BLOCK_SIZE, num_blocks=apart, dtype="float32", seed=0,
        max_model_len=most + 1, max_num_seqs=width * len(jobs),
    )  # fmt: skip
    engine, tokens = llm.engine, iter(text)
    for index, job in enumerate(jobs):
        params = BeamSearchParams(beam_width=width, max_tokens=job.output, ignore_eos=True)
        engine.add_request(f"beams-{index}", list(islice(tokens, job.prompt)), params)
    kept: list[tuple[int, int]] = []
    while engine.has_unfinished:
        engine.step()
        kept.append(_entries_and_blocks(engine.block_map()))
    llm.close()
    entries, blocks = (sum(column) for column in zip(*kept, strict=True))
    peaks = [max(column) for column in zip(*kept, strict=True)]
    return {
        "saved_percent": 100 * (1 - blocks / entries),
        "saved_at_peak_percent": 100 * (1 - peaks[1] / peaks[0]),
        "requests": len(jobs),
        "steps": len(kept),
        "mean_lengths": lengths.mean_of_jobs(jobs),
    }


def _entries_and_blocks(blocks: BlockMap) -> tuple[int, int]:
    """(entries of all tables, distinct blocks in them)."""
    owners = [len(block.seq_ids) for block in blocks.blocks if block.seq_ids]
    return sum(owners), len(owners)


if __name__ == "__main__":
    main()
