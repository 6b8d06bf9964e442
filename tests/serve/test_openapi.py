"""The OpenAPI document, and requests made from it."""

import json
import re
import warnings

import pytest
from pydantic import BaseModel, Field

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own, of packages that it imports
    import schemathesis
    import schemathesis.specs.openapi.schemas  # it comes late; Python 3.11.2 must be alone then
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

from enginery.serve.api.endpoints import Endpoint
from enginery.serve.api.openapi import openapi_json
from enginery.serve.app import ENDPOINTS
from enginery.serve.page import docs_html, html_headers

EXAMPLES = 5


def path_of(endpoint):
    return endpoint.path.replace(":path}", "}")


def document(**options):
    return json.loads(openapi_json(ENDPOINTS, **{"with_keys": False, **options}))


def test_document_has_every_route():
    paths = document()["paths"]
    for endpoint in ENDPOINTS:
        operation = paths[path_of(endpoint)][endpoint.method.lower()]
        assert operation["operationId"]
        named = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path_of(endpoint)))


def test_operation_ids_are_different():
    ids = [
        operation["operationId"]
        for path in document()["paths"].values()
        for operation in path.values()
    ]
    assert len(ids) == len(set(ids))


def test_keys_are_described_where_they_are_needed():
    with_keys = document(with_keys=True)
    assert with_keys["paths"]["/embed"]["post"]["security"] == [{"bearer": []}, {"header": []}]
    assert "401" in with_keys["paths"]["/embed"]["post"]["responses"]
    assert "security" not in with_keys["paths"]["/health"]["get"]
    assert "401" not in document()["paths"]["/embed"]["post"]["responses"]


def test_new_endpoint_is_in_the_document():
    class Body(BaseModel):
        inputs: list[str]

    endpoint = Endpoint("POST", "/x/{y}", None, "plain", "X", body=Body, response=list[int])
    found = json.loads(openapi_json([endpoint], with_keys=False))
    assert list(found["paths"]) == ["/x/{y}"]
    assert "Body" in found["components"]["schemas"]


def test_page_of_the_routes_has_every_route_and_field():
    """It is rendered by the server: no script, and nothing from elsewhere."""
    openapi = openapi_json(ENDPOINTS, with_keys=True)
    page = docs_html(openapi).decode()
    for path, methods in json.loads(openapi)["paths"].items():
        assert f"<code>{path}</code>" in page
        for operation in methods.values():
            assert f'id="{operation["operationId"]}"' in page
    for name in re.findall(r'href="#([^"]+)"', page):
        assert f'id="{name}"' in page
    assert "top_logprobs" in page
    assert not re.search(r"<script|https?://|url\(| on\w+=", page)
    policy = dict(html_headers(page.encode()))["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src" not in policy


def test_page_of_the_routes_is_sent_as_html(running_one):
    found = running_one("GET", "/docs")
    assert (found.status, found.content_type) == (200, "text/html; charset=utf-8")
    assert b"API key is needed" in found.body


def test_names_in_the_page_of_the_routes_are_no_html():
    class Body(BaseModel):
        """<b>Bold</b>"""

        inputs: str = Field(description="<script>x</script>")

    endpoint = Endpoint("POST", "/x", None, "plain", "<i>X</i>", body=Body, response=list[int])
    page = docs_html(openapi_json([endpoint], with_keys=False)).decode()
    assert not re.search(r"<script|<b>|<i>", page)
    assert r"\u003cscript\u003ex" in page


CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
NAMES = (
    "vectors",
    "mood",
    "ranker",
    "names",
    "reader",
    "filler",
    "photos",
    "pictures",
    "writer",
    "nobody",
)


def name_models(operation, schemas):
    """Lets an operation ask for the models that there are, where it may ask for any."""
    for parameter in operation["parameters"]:
        if parameter["name"] == "model":
            parameter["schema"] = {"enum": list(NAMES)}
    for content in operation.get("requestBody", {}).get("content", {}).values():
        name = content["schema"].get("$ref", "").rpartition("/")[2]
        schema = schemas.get(name, {})
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": list(NAMES)}
            schema["required"] = [*dict.fromkeys([*schema.get("required", ()), "model"])]


@pytest.mark.more
@pytest.mark.parametrize(
    "endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}"
)
def test_generated_requests_get_documented_responses(running, endpoint):
    described = document()
    for path in described["paths"].values():
        for operation in path.values():
            name_models(operation, described["components"]["schemas"])
    schema = schemathesis.openapi.from_dict(described)
    schema.config.update(base_url=running.url)
    pattern = path_of(endpoint)
    (operation,) = [
        found.ok()
        for found in schema.include(path=pattern, method=endpoint.method).get_all_operations()
    ]
    takes_anything = "{" in pattern or endpoint.body
    for mode in schemathesis.GenerationMode:
        if mode.is_negative and not takes_anything:
            continue  # there is nothing to get wrong
        strategy = operation.as_strategy(generation_mode=mode)

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def answered(case):
            case.call_and_validate(checks=CHECKS)

        answered()


TEXT = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["warm"]}
GOOD = [
    ("/embed", {}, {"inputs": ["warm"], "model": "vectors"}),
    ("/models/{model}/embed", {"model": "vectors"}, {"inputs": [5, 6]}),
    (
        "/similarity",
        {},
        {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "model": "vectors"},
    ),
    ("/predict", {}, {"inputs": "warm", "model": "mood"}),
    ("/predict", {}, {"inputs": [["warm"], ["a", "b"]], "model": "mood"}),
    ("/rerank", {}, {"query": "a", "texts": ["b"], "return_text": True, "model": "ranker"}),
    ("/tokenize", {}, {"inputs": "warm", "model": "mood"}),
    ("/decode", {}, {"ids": [5, 6], "model": "mood"}),
    ("/", {}, {"inputs": "warm", "model": "mood"}),
    ("/v1/embeddings", {}, {"input": "warm", "model": "vectors"}),
    ("/v1/embeddings", {}, {"input": "a", "model": "vectors", "encoding_format": "base64"}),
    ("/v2/models/{model}/infer", {"model": "mood"}, {"inputs": [TEXT], "id": "7"}),
    ("/predict/{model}", {"model": "mood"}, {"inputs": ["warm", {"text": "a", "text_pair": "b"}]}),
    ("/predict/{model}", {"model": "names"}, {"inputs": "Marie Curie"}),
    ("/predict/{model}", {"model": "filler"}, {"inputs": "[MASK]", "parameters": {"top_k": 1}}),
    ("/predict/{model}", {"model": "vectors"}, {"inputs": "warm"}),
    ("/predict/{model}", {"model": "writer"}, {"inputs": "warm"}),
    ("/generate", {}, {"inputs": "warm", "model": "writer"}),
    ("/generate/{model}", {"model": "writer"}, {"inputs": ["warm", "a"]}),
    ("/generate_stream", {}, {"inputs": "warm", "model": "writer"}),
    ("/v1/completions", {}, {"prompt": "warm", "model": "writer"}),
    ("/v1/completions", {}, {"prompt": "warm", "model": "writer", "stream": True}),
]


@pytest.mark.parametrize(("path", "values", "body"), GOOD)
def test_valid_requests_get_documented_responses(running, path, values, body):
    schema = schemathesis.openapi.from_dict(document())
    schema.config.update(base_url=running.url)
    case = schema[path]["POST"].Case(
        path_parameters=values, body=body, media_type="application/json"
    )
    found = case.call_and_validate(checks=CHECKS)
    assert found.status_code == 200
