"""The `.w4` file: plan, write, open and check it (`formats/w4-container.md`)."""

from w4conv.container.journal import Journal, stamp
from w4conv.container.layout import SIGNATURE, Part, TensorInfo, TensorPlan
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

__all__ = [
    "SIGNATURE",
    "Container",
    "ContainerHeader",
    "Journal",
    "Layout",
    "Part",
    "TensorInfo",
    "TensorPlan",
    "Writer",
    "is_container",
    "is_stream",
    "open_container",
    "open_stream",
    "plan",
    "read_header",
    "stamp",
]
