"""An error response in OpenAI's format."""

from typing import Any


class ApiError(Exception):
    """A refused request. The message is one sentence for the client."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {"Retry-After": str(retry_after)} if retry_after else {}

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
