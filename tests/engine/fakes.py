"""A tokenizer of single letters and a device without JAX, for the engine's own tests."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from jaxpage.config import CacheConfig, EngineConfig, ModelConfig
from jaxpage.engine.engine import LLMEngine
from jaxpage.engine.requests import RequestFactory
from jaxpage.host.plan import StepPlan, StepResult
from jaxpage.host.scheduler import Scheduler
from jaxpage.outputs import RequestOutput
from jaxpage.sampling_params import SamplingParams
from tests.host.fake import VOCAB, FakeDevice, next_token

LETTERS = "abcdefghijklmnopqrstuvwxyz"[:VOCAB]
EOS = VOCAB - 1


class LetterStream:
    def push(self, token_id: int) -> str:
        return LETTERS[token_id]

    @property
    def pending(self) -> str:
        return ""


class LetterTokenizer:
    """Token i is the i-th letter; no special tokens but the end."""

    vocab_size = VOCAB
    bos_token_id = None
    eos_token_ids = (EOS,)
    bos_token = ""
    eos_token = LETTERS[EOS]
    special_ids = frozenset({EOS})
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, token_ids: Seq[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(LETTERS[token_id] for token_id in token_ids)

    def stream(self, *, skip_special_tokens: bool = True) -> LetterStream:
        return LetterStream()


@dataclass
class StubDevice:
    """Dispatches to the checking fake of the host's tests and counts what is in flight."""

    fake: FakeDevice
    most_in_flight: int = 0
    log: list[str] = field(default_factory=list)
    _in_flight: int = 0

    def dispatch(self, plan: StepPlan) -> StepResult:
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        self.log.append(f"dispatch {plan.step_id}")
        return self.fake.run(plan)

    def read(self, ticket: StepResult) -> StepResult:
        self._in_flight -= 1
        self.log.append(f"read {ticket.step_id}")
        return ticket


class StubEngine(LLMEngine):
    """An engine over the stub; adding a request tells the fake what it should say."""

    def __init__(self, *, num_blocks: int = 64, depth: int = 1, **limits: int) -> None:
        cache = CacheConfig(num_blocks=num_blocks, block_size=4)
        config = self.config = replace(EngineConfig(max_model_len=200), **limits)
        model = ModelConfig(
            vocab_size=VOCAB,
            hidden_size=8,
            intermediate_size=8,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            max_position_embeddings=200,
            eos_token_ids=(EOS,),
        )
        self.device = StubDevice(FakeDevice(cache))
        self.scheduler = Scheduler(config, cache)
        factory = RequestFactory(LetterTokenizer(), model, num_token_ids=VOCAB, seed=0)
        super().__init__(self.device, self.scheduler, factory, depth=depth)

    def add(self, name: str, prompt: str | list[int], **params: object) -> None:
        settings = {"temperature": 0.0, "seed": 0, "max_tokens": 12, "ignore_eos": True, **params}
        self.add_request(name, prompt, SamplingParams(**settings))  # pyright: ignore[reportArgumentType]  # any field
        self.device.fake.add(self._live[name].request)


def said(prompt: str, count: int) -> str:
    """What the fake model answers."""
    tokens = [LETTERS.index(letter) for letter in prompt]
    for _ in range(count):
        tokens.append(next_token(tokens, 0))
    return "".join(LETTERS[token] for token in tokens[len(prompt) :])


MOST_STEPS = 10_000


def run(engine: StubEngine) -> dict[str, list[RequestOutput]]:
    """Every snapshot of every request; AssertionError where they never end."""
    news: dict[str, list[RequestOutput]] = {}
    for _ in range(MOST_STEPS):
        if not engine.has_unfinished:
            return news
        for output in engine.step():
            news.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"still unfinished after {MOST_STEPS} steps")
