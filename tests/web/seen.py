"""A window of a browser, and what it complained of and asked for."""


class SeenPage:
    def __init__(self, page, address: str):
        self.page, self.address = page, address
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on(
            "console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text)
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
