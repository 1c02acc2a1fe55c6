"""Checks the local account with Microsoft's Python client. Each check prints one line. A failure means exit code 1."""

import os
import sys
import traceback

from azure.core import MatchConditions
from azure.cosmos import CosmosClient, PartitionKey, exceptions

ENDPOINT = os.environ["COSMOS_ENDPOINT"]
KEY = os.environ["COSMOS_KEY"]
DATABASE = "python"
INDEXING = {
    "indexingMode": "consistent",
    "automatic": True,
    "includedPaths": [{"path": path} for path in ("/instanceId/?", "/kind/?", "/position/?", "/by/?")],
    "excludedPaths": [{"path": "/*"}],
}
ROWS = 40

CHECKS = []


def check(function):
    """Registers a check. Its name is that of the function, with spaces."""
    CHECKS.append((function.__name__.replace("_", " "), function))
    return function


def equal(found, expected):
    assert found == expected, f"found {found!r} instead of {expected!r}"


def refused(status, call):
    """Expects an answer with this status, and returns the error."""
    try:
        found = call()
    except exceptions.CosmosHttpResponseError as error:
        equal(error.status_code, status)
        return error
    raise AssertionError(f"expected status {status}, but the account accepted it: {found!r}")


class Answers:
    """Records the status and the charge of each answer to the calls that pass `**answers.hook`."""

    def __init__(self):
        self.statuses = []
        self.charges = []
        self.hook = {"raw_response_hook": self.record}

    def record(self, response):
        self.statuses.append(response.http_response.status_code)
        self.charges.append(float(response.http_response.headers["x-ms-request-charge"]))


def item(partition, name, **fields):
    return {"id": name, "instanceId": partition, **fields}


def etag_of(container, partition, name):
    return container.read_item(name, partition)["_etag"]


def ids(rows):
    return [row["id"] for row in rows]


def names_in(container, partition):
    return sorted(ids(container.query_items("SELECT c.id FROM c", partition_key=partition)))


def ask(container, text, **options):
    """Queries all partitions."""
    return list(container.query_items(text, enable_cross_partition_query=True, **options))


def run_failing_batch(container, operations, partition):
    """Runs a batch that the account must roll back. Returns its status and that of each operation."""
    answers = Answers()
    try:
        container.execute_item_batch(operations, partition, **answers.hook)
    except exceptions.CosmosBatchOperationError as error:
        return answers.statuses[-1], [result["statusCode"] for result in error.operation_responses]
    raise AssertionError("the account applied the batch")


@check
def a_container_keeps_its_settings(client, _container):
    answers = Answers()
    database = client.get_database_client(DATABASE)
    key = PartitionKey(path="/instanceId", version=2)
    made = database.create_container(
        "settings", key, indexing_policy=INDEXING, default_ttl=-1, **answers.hook
    )
    equal(answers.statuses[-1], 201)
    found = made.read()
    equal(found["partitionKey"]["paths"], ["/instanceId"])
    equal(found["partitionKey"]["version"], 2)
    equal(found["defaultTtl"], -1)
    included = [path["path"] for path in found["indexingPolicy"]["includedPaths"]]
    equal(included, ["/instanceId/?", "/kind/?", "/position/?", "/by/?"])
    assert "/*" in [path["path"] for path in found["indexingPolicy"]["excludedPaths"]]
    refused(409, lambda: database.create_container("settings", key))
    refused(409, lambda: client.create_database(DATABASE))


@check
def an_item_is_created_read_replaced_upserted_and_deleted(_client, container):
    answers = Answers()
    container.create_item(item("point", "a", position=1), **answers.hook)
    equal(container.read_item("a", "point", **answers.hook)["position"], 1)
    container.replace_item("a", item("point", "a", position=2), **answers.hook)
    equal(container.upsert_item(item("point", "a", position=3), **answers.hook)["position"], 3)
    container.upsert_item(item("point", "b", position=4), **answers.hook)
    equal(container.read_item("a", "point", **answers.hook)["position"], 3)
    container.delete_item("a", "point", **answers.hook)
    equal(answers.statuses, [201, 200, 200, 200, 201, 200, 204])
    equal(names_in(container, "point"), ["b"])


@check
def a_second_create_is_refused(_client, container):
    container.create_item(item("duplicate", "a", position=1))
    refused(409, lambda: container.create_item(item("duplicate", "a", position=2)))
    equal(container.read_item("a", "duplicate")["position"], 1)


@check
def a_replace_needs_the_current_etag(_client, container):
    stale = container.create_item(item("etag", "a", position=1))["_etag"]
    current = container.replace_item("a", item("etag", "a", position=2))["_etag"]

    def replace(etag):
        options = {"etag": etag, "match_condition": MatchConditions.IfNotModified}
        return container.replace_item("a", item("etag", "a", position=3), **options)

    refused(412, lambda: replace(stale))
    equal(etag_of(container, "etag", "a"), current)
    equal(replace(current)["position"], 3)


@check
def an_absent_item_is_not_found(client, container):
    refused(404, lambda: container.read_item("nothing", "absent"))
    refused(404, lambda: container.replace_item("nothing", item("absent", "nothing")))
    refused(404, lambda: container.delete_item("nothing", "absent"))
    refused(404, lambda: client.get_database_client(DATABASE).get_container_client("nothing").read())


@check
def a_batch_answers_with_the_etags_of_its_items(_client, container):
    for name in ("replaced", "deleted"):
        container.create_item(item("batch", name, position=1))
    answers = Answers()
    operations = [
        ("create", (item("batch", "created", position=2),)),
        ("upsert", (item("batch", "upserted", position=2),)),
        ("replace", ("replaced", item("batch", "replaced", position=2))),
        ("delete", ("deleted",)),
        ("read", ("created",)),
    ]
    results = container.execute_item_batch(operations, "batch", **answers.hook)
    equal(answers.statuses[-1], 200)
    equal([result["statusCode"] for result in results], [201, 201, 200, 204, 200])
    for index, name in enumerate(("created", "upserted", "replaced")):
        equal(results[index]["eTag"], etag_of(container, "batch", name))
    equal(results[4]["resourceBody"]["position"], 2)
    equal(names_in(container, "batch"), ["created", "replaced", "upserted"])


@check
def a_batch_with_a_duplicate_applies_nothing(_client, container):
    container.create_item(item("batch409", "there"))
    operations = [
        ("create", (item("batch409", "new"),)),
        ("create", (item("batch409", "there"),)),
        ("upsert", (item("batch409", "other"),)),
    ]
    equal(run_failing_batch(container, operations, "batch409"), (207, [424, 409, 424]))
    equal(names_in(container, "batch409"), ["there"])


@check
def a_batch_with_a_stale_etag_applies_nothing(_client, container):
    stale = container.create_item(item("batch412", "a", position=1))["_etag"]
    container.replace_item("a", item("batch412", "a", position=2))
    operations = [
        ("create", (item("batch412", "new"),)),
        ("replace", ("a", item("batch412", "a", position=3)), {"if_match_etag": stale}),
    ]
    equal(run_failing_batch(container, operations, "batch412"), (207, [424, 412]))
    equal(container.read_item("a", "batch412")["position"], 2)
    equal(names_in(container, "batch412"), ["a"])


@check
def a_batch_with_an_absent_item_applies_nothing(_client, container):
    operations = [
        ("delete", ("nothing",)),
        ("create", (item("batch404", "new"),)),
    ]
    equal(run_failing_batch(container, operations, "batch404"), (207, [404, 424]))
    equal(names_in(container, "batch404"), [])


@check
def a_batch_takes_current_etags(_client, container):
    etags = {name: container.create_item(item("batch-etag", name, position=1))["_etag"] for name in ("a", "b")}
    operations = [
        ("replace", ("a", item("batch-etag", "a", position=2)), {"if_match_etag": etags["a"]}),
        ("delete", ("b",), {"if_match_etag": etags["b"]}),
    ]
    results = container.execute_item_batch(operations, "batch-etag")
    equal([result["statusCode"] for result in results], [200, 204])
    equal(container.read_item("a", "batch-etag")["position"], 2)
    equal(names_in(container, "batch-etag"), ["a"])


@check
def a_batch_of_100_operations_is_applied(_client, container):
    operations = [("create", (item("batch100", f"{n}"),)) for n in range(100)]
    results = container.execute_item_batch(operations, "batch100")
    equal([result["statusCode"] for result in results], [201] * 100)
    equal(len(names_in(container, "batch100")), 100)


@check
def a_batch_of_101_operations_is_refused(_client, container):
    operations = [("create", (item("batch101", f"{n}"),)) for n in range(101)]
    refused(400, lambda: container.execute_item_batch(operations, "batch101"))
    equal(names_in(container, "batch101"), [])


@check
def a_query_in_one_partition_takes_parameters(_client, container):
    for partition in ("query", "query-other"):
        for position in range(6):
            container.create_item(item(partition, f"{position}", kind="even" if position % 2 == 0 else "odd", position=position))
    rows = container.query_items(
        "SELECT * FROM c WHERE c.kind = @kind AND c.position >= @position",
        parameters=[{"name": "@kind", "value": "even"}, {"name": "@position", "value": 2}],
        partition_key="query",
    )
    found = sorted((row["instanceId"], row["id"]) for row in rows)
    equal(found, [("query", "2"), ("query", "4")])


@check
def strings_stand_in_single_quotes(_client, container):
    container.create_item(item("single", "a"))
    equal(ids(ask(container, "SELECT * FROM c WHERE c.instanceId = 'single'")), ["a"])
    rows = container.query_items("SELECT * FROM c WHERE c.instanceId = 'single'", partition_key="single")
    equal(ids(rows), ["a"])


@check
def strings_stand_in_double_quotes(_client, container):
    container.create_item(item("double", "a"))
    equal(ids(ask(container, 'SELECT * FROM c WHERE c.instanceId = "double"')), ["a"])
    rows = container.query_items('SELECT * FROM c WHERE c.instanceId = "double"', partition_key="double")
    equal(ids(rows), ["a"])


@check
def pages_across_partitions_have_each_row_once(_client, container):
    found, token, pages = [], None, 0
    while True:
        # Each page is a separate query, so only the token determines where it begins.
        query = container.query_items(
            "SELECT * FROM c WHERE c.kind = 'spread'", enable_cross_partition_query=True, max_item_count=3
        )
        page = query.by_page(token)
        rows = list(next(page))
        assert len(rows) <= 3, f"a page has {len(rows)} rows"
        found, token, pages = found + ids(rows), page.continuation_token, pages + 1
        if not token:
            break
    equal(sorted(found), sorted(f"row{n}" for n in range(ROWS)))
    assert pages > ROWS // 3, f"{ROWS} rows came in {pages} pages"


@check
def rows_across_partitions_come_in_ascending_order(_client, container):
    rows = ask(container, "SELECT * FROM c WHERE c.kind = 'spread' ORDER BY c.position", max_item_count=3)
    equal([row["position"] for row in rows], list(range(ROWS)))


@check
def rows_across_partitions_come_in_descending_order(_client, container):
    rows = ask(container, "SELECT * FROM c WHERE c.kind = 'spread' ORDER BY c.position DESC", max_item_count=3)
    equal([row["position"] for row in rows], list(reversed(range(ROWS))))


@check
def rows_across_partitions_are_counted(_client, container):
    equal(ask(container, "SELECT VALUE COUNT(1) FROM c WHERE c.kind = 'spread'"), [ROWS])


@check
def a_reserved_word_after_a_dot_is_refused(_client, container):
    container.create_item(item("reserved", "a", by="me"))
    refused(400, lambda: list(container.query_items("SELECT c.by FROM c", partition_key="reserved")))
    refused(400, lambda: ask(container, "SELECT c.by FROM c"))


@check
def a_reserved_word_stands_in_brackets(_client, container):
    container.create_item(item("brackets", "a", by="me"))
    equal(list(container.query_items('SELECT c["by"] FROM c', partition_key="brackets")), [{"by": "me"}])
    equal(ask(container, "SELECT VALUE c[\"by\"] FROM c WHERE c.instanceId = 'brackets'"), ["me"])


@check
def a_filter_on_an_unindexed_path_is_refused(_client, container):
    container.create_item(item("unindexed", "a", note="n"))
    text = "SELECT * FROM c WHERE c.note = 'n'"
    refused(400, lambda: list(container.query_items(text, partition_key="unindexed")))
    refused(400, lambda: ask(container, text))


@check
def a_scan_filters_on_an_unindexed_path(_client, container):
    container.create_item(item("scan", "a", note="scanned"))
    text = "SELECT * FROM c WHERE c.note = 'scanned'"
    equal(ids(container.query_items(text, partition_key="scan", enable_scan_in_query=True)), ["a"])
    equal(ids(ask(container, text, enable_scan_in_query=True)), ["a"])


@check
def answers_name_their_request_charge(_client, container):
    answers = Answers()
    container.create_item(item("charge", "a"), **answers.hook)
    container.read_item("a", "charge", **answers.hook)
    container.execute_item_batch([("upsert", (item("charge", "b"),))], "charge", **answers.hook)
    list(container.query_items("SELECT * FROM c", partition_key="charge", **answers.hook))
    equal(len(answers.charges), 4)
    assert all(charge > 0 for charge in answers.charges), f"{answers.charges}"


@check
def a_wrong_key_is_refused(_client, _container):
    refused(401, lambda: CosmosClient(ENDPOINT, "d3Jvbmc="))


def prepare(client):
    """Creates the database and a container with rows in many partitions."""
    database = client.create_database(DATABASE)
    key = PartitionKey(path="/instanceId", version=2)
    container = database.create_container("items", key, indexing_policy=INDEXING, default_ttl=-1)
    for n in range(ROWS):
        # Neighbours in position are in different partitions: 7 and 20 have no common factor.
        container.create_item(item(f"spread{n * 7 % 20}", f"row{n}", kind="spread", position=n))
    return container


def main():
    client = CosmosClient(ENDPOINT, KEY)
    container = prepare(client)
    failures = 0
    for name, function in CHECKS:
        try:
            function(client, container)
            print(f"ok {name}", flush=True)
        except Exception as error:  # A failed check must not hide the others.
            failures += 1
            print(f"FAILED {name}", flush=True)
            reason = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            print(f"{name}: {reason}", file=sys.stderr, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
