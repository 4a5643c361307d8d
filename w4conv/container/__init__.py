"""The `.w4` file: plan, write, open and check it (`formats/w4-container.md`)."""

from w4conv.container.journal import Journal, stamp
from w4conv.container.layout import Part, TensorInfo, TensorPlan
from w4conv.container.plan import Layout, plan
from w4conv.container.reader import (
    Container,
    ContainerHeader,
    is_container,
    is_stream,
    open_container,
    open_stream,
    read_header,
)
from w4conv.container.writer import Writer
from w4conv.files.target import STDOUT, check_target, lock_output, open_target

__all__ = [
    "STDOUT",
    "Container",
    "ContainerHeader",
    "Journal",
    "Layout",
    "Part",
    "TensorInfo",
    "TensorPlan",
    "Writer",
    "check_target",
    "is_container",
    "is_stream",
    "lock_output",
    "open_container",
    "open_stream",
    "open_target",
    "plan",
    "read_header",
    "stamp",
]
