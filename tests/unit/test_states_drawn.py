"""docs/states.md shows what the code does."""

import draw_states


def test_the_committed_page_is_what_the_code_gives() -> None:
    # Mutation: any change of a row of agent.engines.state's table makes this fail.
    assert draw_states.PAGE.read_text() == draw_states.draw()


def test_every_state_of_an_engine_is_reached() -> None:
    reached = {target for _, _, target in draw_states.engine_transitions()}
    assert reached == {"starting", "ready", "backing_off", "failed", "stopping", "stopped"}
