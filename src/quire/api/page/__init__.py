"""Assets for browsers: the chat and monitoring page, and the API reference.

Plain files of this package, served as they are: nothing is built, no other host is asked.
"""

from quire.api.page.files import PageFiles

__all__ = ["PageFiles"]
