"""Random operations: integrity holds after each, and every request says what it says alone."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpage.errors import RequestError
from jaxpage.host import Request
from tests.host.driver import Driver
from tests.host.fake import expected
from tests.host.strategies import drivers, requests


@given(st.data())
def test_requests_say_the_same_whatever_runs_beside_them(data: st.DataObject) -> None:
    driver = data.draw(drivers())
    batch = [data.draw(requests(str(i))) for i in range(data.draw(st.integers(1, 8)))]
    taken: list[Request] = []
    for entry in batch:
        taken += [entry] * try_add(driver, entry)
        for _ in range(data.draw(st.integers(0, 2))):
            driver.step()
            driver.scheduler.check_integrity()
    driver.run()
    for entry in taken:
        driver.check_done(entry)
    driver.check_idle()


def try_add(driver: Driver, entry: Request) -> bool:
    """False where it could never fit, or has more sequences than a step has rows."""
    try:
        driver.add(entry)
    except RequestError:
        return False
    return True


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, finishes and aborts in any order."""

    driver: Driver

    @initialize(driver=drivers())
    def start(self, driver: Driver) -> None:
        self.driver = driver
        self.requests: dict[str, Request] = {}
        self.cut_short: set[str] = set()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        name = str(len(self.requests))
        entry = data.draw(requests(name))
        if try_add(self.driver, entry):
            self.requests[name] = entry

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), by_engine=st.booleans())
    def cut_short_one(self, data: st.DataObject, by_engine: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        news = self.driver.news[name]
        was_live = not news.is_over
        if by_engine and self.requests[name].beam is None:
            sample = data.draw(st.integers(0, len(news.samples) - 1))
            self.driver.scheduler.finish(self.driver.seq_ids[name] + sample, "stop", "end")
        else:
            assert self.driver.scheduler.abort(name) == was_live
        self.driver.take_news()
        if was_live:
            self.cut_short.add(name)

    @rule()
    def forget_prefixes(self) -> None:
        self.driver.scheduler.reset_prefix_cache()

    @invariant()
    def integrity_holds(self) -> None:
        self.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.run()
        driver.check_idle()
        for name, entry in self.requests.items():
            if name in self.cut_short:
                self.check_cut_short(name, entry)
            else:
                driver.check_done(entry)

    def check_cut_short(self, name: str, entry: Request) -> None:
        driver, news = self.driver, self.driver.news[name]
        assert news.is_over
        if entry.beam is not None:
            assert not any(said.token_ids for said in news.samples)
            return
        for index, said in enumerate(news.samples):
            want = expected(entry, driver.config, driver.cache, index).token_ids
            assert tuple(said.token_ids) == want[: len(said.token_ids)]


SchedulerMachine.TestCase.settings = settings(stateful_step_count=20, max_examples=40)
TestScheduler = SchedulerMachine.TestCase
