"""Assets for browsers: the chat and monitoring page, and the API reference.

They are plain files of this package: nothing is built, and no other host is contacted.
"""

from quire.api.page.files import PageFiles

__all__ = ["PageFiles"]
