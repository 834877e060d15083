"""Every part of the project under every switch of JAX: what works, what is refused, what breaks.

    python -m benchmarks.checks.switches                       the whole table, a few minutes
    python -m benchmarks.checks.switches --only x64 --part sample

A part is a public function, or an engine that serves requests, with arguments of its own. Under a
switch it must give what it gives without, to the bit (to rounding where the switch makes another
program of it), or be refused by a ConfigError of one line. Exit code 1 where something else is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import jaxpage as jp
import pallas_kernels as pk
from benchmarks.common.report import first_line
from jaxpage import native
from jaxpage.backends import PLAIN
from jaxpage.device import kv_cache, step
from pallas_kernels import reference

CONFIG = jp.ModelConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
BLOCK_SIZE = 4
NUM_BLOCKS = 12
MESH_AXIS = "switches"

Switch = Callable[[], AbstractContextManager[Any]]


def _mesh(axis_type: jax.sharding.AxisType) -> AbstractContextManager[Any]:
    count = len(jax.devices())
    return jax.set_mesh(jax.make_mesh((count,), (MESH_AXIS,), axis_types=(axis_type,)))


SWITCHES: dict[str, Switch] = {
    "x64": lambda: jax.enable_x64(True),
    "explicit mesh": lambda: _mesh(jax.sharding.AxisType.Explicit),
    "auto mesh": lambda: _mesh(jax.sharding.AxisType.Auto),
    "transfer guard": lambda: jax.transfer_guard("disallow"),
    "debug infs": lambda: jax.debug_infs(True),
    "debug nans": lambda: jax.debug_nans(True),
    "disable jit": lambda: jax.disable_jit(),
    "strict dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "leak checks": lambda: jax.checking_leaks(),
    "jax checks": lambda: jax.enable_checks(True),
    "bfloat16 products": lambda: jax.default_matmul_precision("bfloat16"),
    "second device": lambda: jax.default_device(jax.devices()[-1]),
}
"""Each as a context of this thread."""


class Part(NamedTuple):
    """A function of arrays with arguments to call it with, or an engine's work with none."""

    run: Callable[..., Any]
    args: tuple[Any, ...] = ()


def parts() -> dict[str, Part]:
    """Every part by its name; arguments are made without any switch."""
    return {**_core_parts(), **_kernel_parts(), **_native_parts(), **_engine_parts()}


def outcome(name: str, part: Part, switch: Switch) -> str:
    """ "same", "close" but for rounding, "refused: ..." or what went wrong, in a line."""
    wanted = _result(name, part)
    try:
        with switch():
            got = _on_host(part.run(*part.args))
    except jp.ConfigError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the finding
        return f"FAILED: {type(error).__name__}: {_line(error)}"
    if _same(got, wanted):
        return "same"
    return "close" if _close(got, wanted) else "DIFFERENT"


def sharded(name: str, part: Part, *, varying: str) -> str:
    """The outcome under `jax.shard_map` with its checks; `varying`: "all" arguments or "first"."""
    wanted = _result(name, part)
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), (MESH_AXIS,), devices=jax.devices()[:2], axis_types=types)
    spread, alone = PartitionSpec(MESH_AXIS), PartitionSpec()
    count = len(part.args) if varying == "all" else 1
    args = [
        jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), arg) if place < count else arg
        for place, arg in enumerate(part.args)
    ]
    specs = tuple(spread if place < count else alone for place in range(len(args)))

    def run(*args: Any) -> Any:
        own = [
            jax.tree.map(lambda leaf: leaf[0], arg) if place < count else arg
            for place, arg in enumerate(args)
        ]
        return jax.tree.map(lambda leaf: leaf[None], part.run(*own))

    try:
        both = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=spread))(*args)
        both = _on_host(both)
    except (jp.ConfigError, NotImplementedError) as error:
        return f"refused: {_line(error)}"
    except Exception as error:  # noqa: BLE001
        return f"FAILED: {type(error).__name__}: {_line(error)}"
    halves = ([leaf[index] for leaf in both] for index in (0, 1))
    return "close" if all(_close(half, wanted) for half in halves) else "DIFFERENT"


def _core_parts() -> dict[str, Part]:
    model, params, cache = _model(), _params(), _pool()
    prefill, decode, shared = _prefill(), _decode(), _shared()
    draw = jp.DrawInput(
        hidden=jnp.zeros((3, 1)),
        token_ids=jnp.array([5, 9, 1], jnp.int32),
        positions=jnp.array([6, 4, 2], jnp.int32),
    )
    logits = jax.random.normal(jax.random.key(2), (3, CONFIG.vocab_size)) * 4
    found: dict[str, Part] = {}
    for name in _attentions():
        run = partial(jp.forward, model, attention=name)
        found[f"forward {name} prefill"] = Part(run, (params, cache, prefill))
        found[f"forward {name} decode"] = Part(run, (params, cache, decode))
        found[f"forward {name} shared prefix"] = Part(run, (params, cache, shared))
        found[f"jit forward {name}"] = Part(jax.jit(run), (params, cache, decode))
    run = partial(jp.prefill, model, num_top=3)
    found["prefill and draw"] = Part(run, (params, cache, prefill))
    run = partial(step.hidden_step, model, backend=PLAIN)
    found["hidden step"] = Part(run, (params, cache, decode, jnp.zeros(4, jnp.int32)))
    run = partial(step.prompt_logprobs, model, backend=PLAIN, num_top=3, slice_rows=4)
    hidden = jax.random.normal(jax.random.key(4), (6, CONFIG.hidden_size))
    found["prompt logprobs"] = Part(run, (params, hidden, jnp.arange(6, dtype=jnp.int32)))
    for name, settings in _samplings().items():
        run = partial(jp.sample, num_top=5, num_token_ids=40)
        found[f"sample {name}"] = Part(run, (logits, draw, settings))
        found[f"jit sample {name}"] = Part(jax.jit(run), (logits, draw, settings))
    pairs = jnp.array([[1, 2], [5, 99]], jnp.int32)
    found["block moves"] = Part(kv_cache.apply_moves, (cache, pairs[0], pairs[1]))
    found["gather blocks"] = Part(kv_cache.gather_blocks, (cache, pairs[0]))
    blocks = kv_cache.gather_blocks(cache, pairs[0])
    found["scatter blocks"] = Part(kv_cache.scatter_blocks, (cache, blocks, pairs[1]))
    found["init_params"] = Part(lambda: jp.init_params(CONFIG, 3))
    found["init_cache"] = Part(lambda: jp.init_cache(CONFIG, NUM_BLOCKS, BLOCK_SIZE))
    found["inputs"] = Part(lambda: (_prefill(), _decode(), _samplings()))
    found["gradient"] = Part(jax.jit(jax.grad(_loss)), (params, cache, prefill))
    return found


def _kernel_parts() -> dict[str, Part]:
    layer = _pool()[0]
    keys = jax.random.split(jax.random.key(5), 3)
    q = jax.random.normal(keys[0], (3, 4, 8))
    tables = jnp.array([[1, 2], [1, 3], [4, 5]], jnp.int32)
    lens = jnp.array([6, 7, 0], jnp.int32)
    pool = (layer.k, layer.v, tables, lens)
    starts = jnp.array([0, 1, 3, 3], jnp.int32)
    groups = (jnp.array([[0, 1, 3]], jnp.int32), jnp.array([4], jnp.int32))
    k, v = jax.random.normal(keys[1], (2, 3, 2, 8))
    slots = jnp.array([4, 9, 1000], jnp.int32)
    k8, k_scales = pk.quantize(layer.k, "int8")
    v8, v_scales = pk.quantize(layer.v, "int8")
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    found: dict[str, Part] = {}
    for label, home in (("kernel", pk), ("oracle", reference)):
        for lse in (False, True):
            how = {"scale": 0.3, "sliding_window": 5, "soft_cap": 20.0, "return_lse": lse}
            end = " with lse" if lse else ""
            run = partial(home.paged_decode_attention, **how)
            found[f"{label} decode{end}"] = Part(run, (q, *pool))
            run = partial(home.paged_prefill_attention, **how)
            found[f"{label} prefill{end}"] = Part(run, (q, *pool, starts))
            run = partial(home.shared_prefix_decode_attention, **how)
            found[f"{label} shared prefix{end}"] = Part(run, (q, *pool, *groups))
        int8 = (q, k8, v8, tables, lens)
        run = partial(home.paged_decode_attention, scale=0.3, **scales)
        found[f"{label} decode int8"] = Part(run, int8)
        found[f"{label} write"] = Part(home.write_kv, (layer.k, layer.v, k, v, slots))
        found[f"{label} write of one"] = Part(
            home.write_kv, (layer.k, layer.v, k[:1], v[:1], slots[:1])
        )
        run = partial(home.write_kv, **scales)
        found[f"{label} write int8"] = Part(run, (k8, v8, k, v, slots))
    found["quantize"] = Part(partial(pk.quantize, dtype="float8_e4m3fn"), (k,))
    found["dequantize"] = Part(pk.dequantize, (k8, k_scales))
    both = pk.paged_decode_attention(q, *pool, scale=0.3, return_lse=True)
    found["merge"] = Part(lambda out, lse: pk.merge_partials([out, out], [lse, lse]), tuple(both))
    return found


def _native_parts() -> dict[str, Part]:
    if not native.is_built():
        return {}
    x = jax.random.normal(jax.random.key(6), (3, 8))
    qkv = jax.random.normal(jax.random.key(7), (3, 2, 4, 8))
    layer, now = _pool()[0], _decode()
    k = qkv[:, :, 0]
    run = partial(
        native.paged_attention, scale=0.3, block_tables=now.block_tables, slots=now.slots,
        context_lens=now.context_lens, query_starts=now.query_starts,
    )  # fmt: skip
    q = qkv[:, :, :2].reshape(3, 4, 8)
    return {
        "native matmul": Part(native.matmul, (x, x)),
        "native rms_norm": Part(partial(native.rms_norm, eps=1e-5), (x, x[0])),
        "native swiglu": Part(native.swiglu, (x,)),
        "native rope_qkv": Part(native.rope_qkv, (qkv, x[:, :4], x[:, 4:])),
        "native argmax_logsumexp": Part(native.argmax_logsumexp, (x,)),
        "native attention": Part(run, (q, k, k, layer.k, layer.v)),
    }


def _engine_parts() -> dict[str, Part]:
    return {f"engine {name}": Part(partial(serve, name)) for name in _attentions()}


def serve(attention: str) -> list[Any]:
    """What a fresh engine makes of greedy, drawn, penalised, edited and shared requests, beams."""
    llm = jp.LLM(
        config=CONFIG, params=_params(), block_size=BLOCK_SIZE, num_blocks=40, max_num_seqs=4,
        max_model_len=48, max_num_batched_tokens=64, seed=0, attention=attention,
    )  # fmt: skip
    same = list(range(3, 12))
    work: list[tuple[list[int], Any]] = [
        (same, jp.SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2)),
        (
            [*same, 1],
            jp.SamplingParams(
                n=2, temperature=0.9, top_k=5, top_p=0.9, min_p=0.01, seed=3, max_tokens=4,
                logprobs=8, logprobs_mode="processed",
            ),
        ),
        (
            [*same, 2],
            jp.SamplingParams(
                temperature=0.7, seed=1, max_tokens=4, presence_penalty=0.5,
                frequency_penalty=0.5, repetition_penalty=1.2,
            ),
        ),
        (
            [7, 8],
            jp.SamplingParams(
                temperature=0, max_tokens=4, min_tokens=2, stop_token_ids=(7,),
                logit_bias={5: 2.0, 6: -100.0}, allowed_token_ids=(4, 5, 6, 7, 8), logprobs=3,
            ),
        ),
        ([9, 10], jp.BeamSearchParams(beam_width=2, max_tokens=3)),
    ]  # fmt: skip
    prompts, params = [list(prompt) for prompt, _ in work], [each for _, each in work]
    outputs = llm.generate(prompts, params, raise_on_error=True)
    llm.close()
    return [
        [(o.token_ids, o.cumulative_logprob, o.logprobs, o.score) for o in output.outputs]
        + [output.prompt_logprobs]
        for output in outputs
    ]


def _attentions() -> list[str]:
    return ["reference", "xla", "pallas", *(["native"] if native.is_built() else [])]


def _loss(params: Any, cache: Any, prefill: Any) -> Any:
    return jp.forward(_model(), params, cache, prefill, attention="reference")[1].sum()


@cache
def _model() -> Any:
    return jp.build_model(CONFIG)


@cache
def _params() -> Any:
    return jp.init_params(CONFIG, 1)


def _pool() -> Any:
    empty = jp.init_cache(CONFIG, NUM_BLOCKS, BLOCK_SIZE)
    keys = iter(jax.random.split(jax.random.key(8), 4))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), empty)


def _prefill() -> Any:
    return jp.prefill_input([[1, 5, 9], [7, 3]], [[1, 2], [3]], BLOCK_SIZE, starts=[2, 0])


def _decode() -> Any:
    return jp.decode_input([4, 2, 6], [5, 6, 0], [[1, 2], [3, 4], [5]], BLOCK_SIZE)


def _shared() -> Any:
    from dataclasses import replace

    now = jp.decode_input([4, 2, 6], [5, 6, 0], [[1, 2], [1, 4], [5]], BLOCK_SIZE)
    groups = jax.device_put(np.array([[0, 1, 3]], np.int32))
    return replace(now, group_rows=groups, prefix_lens=jax.device_put(np.array([4], np.int32)))


def _samplings() -> dict[str, Any]:
    size = 40
    edits = jp.logit_edits(
        3, size, bias=[{3: 1.5}, {}, {4: -1.0}], allowed=[None, [1, 2, 3], None],
        stop_ids=[[2], [], []], min_position=[9, 0, 0],
    )  # fmt: skip
    history = jp.draw_history(
        3, size, tokens=[[1, 2, 3], [4], [5]], prompt_lens=[1, 1, 1], presence=[0.5, 0, 0],
        frequency=0.25, repetition=[1.0, 1.3, 1.0], bad_words=[[[3, 5, 7]], [], []],
    )  # fmt: skip
    drawn = {"temperature": [0.0, 0.8, 1.5], "seed": [1, 2, 2**40], "top_k": [0, 5, 0]}
    both = {"top_p": [1.0, 0.8, 0.9], "min_p": [0.0, 0.0, 0.05], "processed_logprobs": True}
    return {
        "greedy": jp.sampling_input(3),
        "drawn": jp.sampling_input(3, **drawn, **both),
        "edited": jp.sampling_input(3, **drawn, edits=edits),
        "penalised": jp.sampling_input(3, **drawn, history=history),
    }


_KNOWN: dict[str, list[Any]] = {}


def _result(name: str, part: Part) -> list[Any]:
    """What the part gives without any switch."""
    if name not in _KNOWN:
        _KNOWN[name] = _on_host(part.run(*part.args))
    return _KNOWN[name]


def _on_host(tree: Any) -> list[Any]:
    return [
        jax.device_get(leaf) if isinstance(leaf, jax.Array) else leaf
        for leaf in jax.tree.leaves(tree)
    ]


def _same(got: list[Any], wanted: list[Any]) -> bool:
    return len(got) == len(wanted) and all(map(_equal, got, wanted))


def _equal(got: Any, wanted: Any) -> bool:
    if not isinstance(wanted, np.ndarray):
        return got == wanted
    return got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes()


def _close(got: list[Any], wanted: list[Any]) -> bool:
    """Equal whole numbers, other numbers to a float32's rounding: another program rounds anew."""
    return len(got) == len(wanted) and all(map(_alike, got, wanted))


def _alike(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, float):
        return abs(got - wanted) < 1e-4 or got == wanted
    if not isinstance(wanted, np.ndarray) or wanted.dtype.kind in "iub":
        return _equal(got, wanted)
    return got.dtype == wanted.dtype and np.allclose(got, wanted, rtol=1e-5, atol=1e-5)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:140]


def rows(only: str, part_name: str) -> Iterator[tuple[str, str, str]]:
    """(switch, part, outcome) of all that match."""
    chosen = {name: part for name, part in parts().items() if part_name in name}
    for switch_name, switch in SWITCHES.items():
        if only in switch_name:
            for name, part in chosen.items():
                yield switch_name, name, outcome(name, part, switch)
    for varying in ("all", "first"):
        if only in f"shard_map {varying}":
            for name, part in chosen.items():
                if part.args:
                    yield f"shard_map {varying}", name, sharded(name, part, varying=varying)


def main() -> None:
    parser = argparse.ArgumentParser(description=first_line(__doc__))
    parser.add_argument("--only", default="", help="switches whose name has this")
    parser.add_argument("--part", default="", help="parts whose name has this")
    parser.add_argument("--verbose", action="store_true", help="also what works")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    counts: dict[str, dict[str, int]] = {}
    for switch, part, found in rows(args.only, args.part):
        kind = found.partition(":")[0]
        counts.setdefault(switch, {}).setdefault(kind, 0)
        counts[switch][kind] += 1
        if args.verbose or kind not in ("same", "close"):
            print(f"{switch:18} {part:30} {found}", flush=True)
    for switch, kinds in counts.items():
        print(f"{switch:18} " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    sys.exit(any(kind in ("FAILED", "DIFFERENT") for kinds in counts.values() for kind in kinds))


if __name__ == "__main__":
    main()
