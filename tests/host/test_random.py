"""Random operations: the books agree after each, and every request says what it says alone."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpage.host import Request
from tests.host.driver import Driver
from tests.host.fake import expected
from tests.host.strategies import drivers, requests


@given(st.data())
def test_requests_say_the_same_whatever_runs_beside_them(data: st.DataObject) -> None:
    driver = data.draw(drivers())
    batch = [data.draw(requests(str(i))) for i in range(data.draw(st.integers(1, 8)))]
    for entry in batch:
        driver.add(entry)
        for _ in range(data.draw(st.integers(0, 2))):
            driver.step()
            driver.scheduler.check_integrity()
    driver.run()
    for entry in batch:
        driver.check_done(entry)
    driver.check_idle()


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
        self.requests[name] = data.draw(requests(name))
        self.driver.add(self.requests[name])

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()
            self.driver.scheduler.check_integrity()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), by_engine=st.booleans())
    def cut_short_one(self, data: st.DataObject, by_engine: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        was_live = not self.driver.news[name].ends
        if by_engine:
            self.driver.scheduler.finish(self.driver.seq_ids[name], "stop", "end")
        else:
            assert self.driver.scheduler.abort(name) == was_live
        self.driver.take_news()
        if was_live:
            self.cut_short.add(name)

    @invariant()
    def books_agree(self) -> None:
        self.driver.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.run()
        driver.check_idle()
        for name, entry in self.requests.items():
            if name in self.cut_short:
                said = tuple(driver.news[name].token_ids)
                want = expected(entry, driver.config, driver.cache).token_ids
                assert said == want[: len(said)]
                assert len(driver.news[name].ends) == 1
            else:
                driver.check_done(entry)


SchedulerMachine.TestCase.settings = settings(stateful_step_count=25)
TestScheduler = SchedulerMachine.TestCase
