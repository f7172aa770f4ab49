"""Payloads through a file, as pictures to compare, and with one value changed."""

from __future__ import annotations

import io

import torch

from resumable_data.checkpoint import build_payload


def through_a_file(payload):
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def picture(value):
    """Everything of a state as text, bit by bit."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), repr(value.detach().flatten().tolist())]
    if isinstance(value, dict):
        return {str(key): picture(item) for key, item in value.items() if key != "wall_saved_at"}
    if isinstance(value, (list, tuple)):
        return [picture(item) for item in value]
    return repr(value)


def whole(objects, step=0):
    return picture(build_payload(objects, step=step))


def edit(payload, *path):
    *parents, last = path
    for key in parents:
        payload = payload[key]
    return payload, last


def set_at(*path, value):
    def change(payload):
        place, last = edit(payload, *path)
        place[last] = value(place[last]) if callable(value) else value

    return change


def del_at(*path):
    def change(payload):
        place, last = edit(payload, *path)
        del place[last]

    return change
