"""A client of the gRPC interface that goes on when its tokenizer dies: the README's example, and all that it takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from tokenloom.api.v1.inference_pb2 import CompleteRequest


def complete(stubs: Iterable[Any], request: CompleteRequest) -> str:
    """The text of one choice. When a call is lost, the next of the InferenceService stubs takes it up where it was."""
    options = request.options
    options.return_token_ids, text, had = True, "", options.resume_token_ids.add()
    for stub in stubs:
        held = ""  # text of no token: what the end sets free comes right before it
        try:
            for event in (response.event for response in stub.Complete(request)):
                if event.HasField("accepted"):  # from here on with these ids, this seed, these limits
                    request.prompts[0].token_ids.CopyFrom(event.accepted.prompts[0])
                    options.request_id = event.accepted.request_id
                    options.sampling.CopyFrom(event.accepted.sampling)
                    options.stop.CopyFrom(event.accepted.stop)
                elif event.HasField("choice_finished"):
                    return text + held
                elif event.delta.token_ids:
                    text += event.delta.text
                    had.ids.extend(event.delta.token_ids)
                else:
                    held = event.delta.text
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
    raise ConnectionError("no tokenizer is left")
