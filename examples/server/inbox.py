"""How the events of a request get from the engine's thread to a coroutine."""

import asyncio

GONE = object()                   # an event: whoever asked has left


class Inbox:
    """Events of one request, from the engine's thread by way of the loop; those that wait come together."""

    def __init__(self):
        self.events, self.filled = [], asyncio.Event()

    def put(self, event):
        self.events.append(event)
        self.filled.set()

    async def get(self):
        await self.filled.wait()
        self.filled.clear()
        events, self.events = self.events, []
        return events
