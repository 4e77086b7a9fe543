"""A chat with a toy model on the terminal this runs in: `python -m tests.core.chat.toy_chat '{...}'`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from starsd_edge.chat.conversation import Conversation
from starsd_edge.chat.repl import Repl
from starsd_edge.chat.show import Look
from tests.core.chat.toys import toy_speaker


def main() -> None:
    options = json.loads(sys.argv[1])
    history = options.pop("history", None)
    conversation = Conversation(toy_speaker(**options))
    look = Look(sys.stdout, live=True, colour=not os.environ.get("NO_COLOR"))
    Repl(conversation, look, Path(history) if history else None).run()
    print("left the chat")  # noqa: T201


if __name__ == "__main__":
    main()
