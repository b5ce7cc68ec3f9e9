"""The demo's requests: documents are as long as their titles say."""

import re

import pytest

from prfaas.cli.deploy.demo_table import DemoRequest, demo_requests

DOCUMENTS = [each for each in demo_requests() if each.title.startswith("document")]


def test_there_are_five_documents_among_twelve_requests() -> None:
    assert (len(demo_requests()), len(DOCUMENTS)) == (12, 5)


@pytest.mark.parametrize("request_", DOCUMENTS, ids=lambda each: each.title)
def test_a_document_is_as_long_as_its_title_says(request_: DemoRequest) -> None:
    [thousands] = re.findall(r"(\d+)K", request_.title)
    assert len(request_.text) >= 1000 * int(thousands)
