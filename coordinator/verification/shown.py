"""Tells the scheduler which nodes have shown what their cards can do."""

from coordinator.fleet.registry import FleetRegistry
from coordinator.scheduler import events as e
from coordinator.scheduler.driver import SchedulerDriver
from inference.task import NodeId


async def tell_shown(registry: FleetRegistry, driver: SchedulerDriver) -> None:
    """Tell it for ever, with each change. Whoever it has not been told about has shown nothing."""
    told: set[NodeId] = set()
    with registry.watch() as watch:
        while True:
            for node_id in await watch.changed():
                view = registry.find(node_id)
                verified = view is not None and view.verified
                if verified is not (node_id in told):
                    (told.add if verified else told.discard)(node_id)
                    driver.feed(e.CapabilityShown(node_id, verified))
