// Checks the local account with Microsoft's JavaScript client. Each check prints one line. A failure means exit code 1.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

// The client is installed in the build directory, where a normal import does not look.
const require = createRequire(join(process.env.CLIENTS_DIR, "package.json"));
const { CosmosClient } = require("@azure/cosmos");

const endpoint = process.env.COSMOS_ENDPOINT;
const key = process.env.COSMOS_KEY;
const DATABASE = "javascript";
const PARTITION_KEY = { paths: ["/instanceId"], version: 2 };
const INCLUDED = ["/instanceId/?", "/kind/?", "/position/?", "/by/?"];
const INDEXING = {
  indexingMode: "consistent",
  automatic: true,
  includedPaths: INCLUDED.map((path) => ({ path })),
  excludedPaths: [{ path: "/*" }],
};
const ROWS = 40;
const RANKS = Array.from({ length: ROWS }, (_, n) => n);

const checks = [];

/** Registers a check. */
function check(name, run) {
  checks.push({ name, run });
}

/** Expects an answer with this status. */
async function refused(status, call) {
  let found;
  try {
    found = await call();
  } catch (error) {
    // The client wraps the answer to a batch in an error without code.
    assert.equal((error.cause ?? error).code, status, error.stack);
    return;
  }
  assert.fail(`expected status ${status}, but the account accepted it: ${JSON.stringify(found.resources)}`);
}

function item(instanceId, id, fields = {}) {
  return { id, instanceId, ...fields };
}

function ids(rows) {
  return rows.map((row) => row.id);
}

async function etagOf(container, partition, id) {
  return (await container.item(id, partition).read()).etag;
}

/** Queries one partition, or all of them. */
async function ask(container, query, options = {}) {
  return (await container.items.query(query, options).fetchAll()).resources;
}

async function namesIn(container, partition) {
  return ids(await ask(container, "SELECT c.id FROM c", { partitionKey: partition })).sort();
}

const create = (resourceBody) => ({ operationType: "Create", resourceBody });
const upsert = (resourceBody) => ({ operationType: "Upsert", resourceBody });
const replace = (resourceBody, ifMatch) => ({ operationType: "Replace", id: resourceBody.id, resourceBody, ifMatch });
const read = (id) => ({ operationType: "Read", id });
const remove = (id, ifMatch) => ({ operationType: "Delete", id, ifMatch });

/** Runs a batch. Returns its status and that of each operation. */
async function runBatch(container, operations, partition) {
  const answer = await container.items.batch(operations, partition);
  return { status: answer.code, each: answer.result.map((result) => result.statusCode), results: answer.result };
}

async function expectRollback(container, operations, partition, each) {
  const answer = await runBatch(container, operations, partition);
  assert.equal(answer.status, 207);
  assert.deepEqual(answer.each, each);
}

check("a container keeps its settings", async ({ client }) => {
  const database = client.database(DATABASE);
  const settings = { id: "settings", partitionKey: PARTITION_KEY, indexingPolicy: INDEXING, defaultTtl: -1 };
  const made = await database.containers.create(settings);
  assert.equal(made.statusCode, 201);
  const { resource: found } = await made.container.read();
  assert.deepEqual(found.partitionKey.paths, ["/instanceId"]);
  assert.equal(found.partitionKey.version, 2);
  assert.equal(found.defaultTtl, -1);
  assert.deepEqual(found.indexingPolicy.includedPaths.map(({ path }) => path), INCLUDED);
  assert.ok(found.indexingPolicy.excludedPaths.some(({ path }) => path === "/*"));
  await refused(409, () => database.containers.create(settings));
  await refused(409, () => client.databases.create({ id: DATABASE }));
});

check("an item is created read replaced upserted and deleted", async ({ container }) => {
  const a = container.item("a", "point");
  const statuses = [];
  const note = (answer) => {
    statuses.push(answer.statusCode);
    return answer.resource?.position;
  };
  note(await container.items.create(item("point", "a", { position: 1 })));
  assert.equal(note(await a.read()), 1);
  note(await a.replace(item("point", "a", { position: 2 })));
  assert.equal(note(await container.items.upsert(item("point", "a", { position: 3 }))), 3);
  note(await container.items.upsert(item("point", "b", { position: 4 })));
  assert.equal(note(await a.read()), 3);
  note(await a.delete());
  assert.deepEqual(statuses, [201, 200, 200, 200, 201, 200, 204]);
  assert.deepEqual(await namesIn(container, "point"), ["b"]);
});

check("a second create is refused", async ({ container }) => {
  await container.items.create(item("duplicate", "a", { position: 1 }));
  await refused(409, () => container.items.create(item("duplicate", "a", { position: 2 })));
  assert.equal((await container.item("a", "duplicate").read()).resource.position, 1);
});

check("a replace needs the current etag", async ({ container }) => {
  const a = container.item("a", "etag");
  const stale = (await container.items.create(item("etag", "a", { position: 1 }))).etag;
  const current = (await a.replace(item("etag", "a", { position: 2 }))).etag;
  const replaceIf = (condition) =>
    a.replace(item("etag", "a", { position: 3 }), { accessCondition: { type: "IfMatch", condition } });
  await refused(412, () => replaceIf(stale));
  assert.equal(await etagOf(container, "etag", "a"), current);
  assert.equal((await replaceIf(current)).resource.position, 3);
});

check("an absent item is not found", async ({ client, container }) => {
  const nothing = container.item("nothing", "absent");
  // This client reports the read of an absent item without an error.
  assert.equal((await nothing.read()).statusCode, 404);
  await refused(404, () => nothing.replace(item("absent", "nothing")));
  await refused(404, () => nothing.delete());
  await refused(404, () => client.database(DATABASE).container("nothing").read());
});

check("a batch answers with the etags of its items", async ({ container }) => {
  for (const name of ["replaced", "deleted"]) await container.items.create(item("batch", name, { position: 1 }));
  const operations = [
    create(item("batch", "created", { position: 2 })),
    upsert(item("batch", "upserted", { position: 2 })),
    replace(item("batch", "replaced", { position: 2 })),
    remove("deleted"),
    read("created"),
  ];
  const { status, each, results } = await runBatch(container, operations, "batch");
  assert.equal(status, 200);
  assert.deepEqual(each, [201, 201, 200, 204, 200]);
  for (const [index, name] of ["created", "upserted", "replaced"].entries()) {
    assert.equal(results[index].eTag, await etagOf(container, "batch", name));
  }
  assert.equal(results[4].resourceBody.position, 2);
  assert.deepEqual(await namesIn(container, "batch"), ["created", "replaced", "upserted"]);
});

check("a batch with a duplicate applies nothing", async ({ container }) => {
  await container.items.create(item("batch409", "there"));
  const operations = ["new", "there"].map((name) => create(item("batch409", name)));
  operations.push(upsert(item("batch409", "other")));
  await expectRollback(container, operations, "batch409", [424, 409, 424]);
  assert.deepEqual(await namesIn(container, "batch409"), ["there"]);
});

check("a batch with a stale etag applies nothing", async ({ container }) => {
  const stale = (await container.items.create(item("batch412", "a", { position: 1 }))).etag;
  await container.item("a", "batch412").replace(item("batch412", "a", { position: 2 }));
  const operations = [create(item("batch412", "new")), replace(item("batch412", "a", { position: 3 }), stale)];
  await expectRollback(container, operations, "batch412", [424, 412]);
  assert.equal((await container.item("a", "batch412").read()).resource.position, 2);
  assert.deepEqual(await namesIn(container, "batch412"), ["a"]);
});

check("a batch with an absent item applies nothing", async ({ container }) => {
  const operations = [remove("nothing"), create(item("batch404", "new"))];
  await expectRollback(container, operations, "batch404", [404, 424]);
  assert.deepEqual(await namesIn(container, "batch404"), []);
});

check("a batch takes current etags", async ({ container }) => {
  const etags = [];
  for (const name of ["a", "b"]) {
    etags.push((await container.items.create(item("batch-etag", name, { position: 1 }))).etag);
  }
  const operations = [replace(item("batch-etag", "a", { position: 2 }), etags[0]), remove("b", etags[1])];
  const { status, each } = await runBatch(container, operations, "batch-etag");
  assert.equal(status, 200);
  assert.deepEqual(each, [200, 204]);
  assert.equal((await container.item("a", "batch-etag").read()).resource.position, 2);
  assert.deepEqual(await namesIn(container, "batch-etag"), ["a"]);
});

check("a batch of 100 operations is applied", async ({ container }) => {
  const operations = Array.from({ length: 100 }, (_, n) => create(item("batch100", `${n}`)));
  const { status, each } = await runBatch(container, operations, "batch100");
  assert.equal(status, 200);
  assert.ok(each.every((one) => one === 201), `${each}`);
  assert.equal((await namesIn(container, "batch100")).length, 100);
});

check("a batch of 101 operations is refused", async ({ container }) => {
  // The client itself refuses 101 operations, so a plugin adds one to the request.
  const operations = Array.from({ length: 100 }, (_, n) => create(item("batch101", `${n}`)));
  const addOne = async (request, _diagnostics, next) => {
    if (request.operationType === "batch") request.body = [...request.body, create(item("batch101", "100"))];
    return next(request);
  };
  const client = new CosmosClient({ endpoint, key, plugins: [{ on: "request", plugin: addOne }] });
  const altered = client.database(DATABASE).container(container.id);
  await refused(400, () => altered.items.batch(operations, "batch101"));
  client.dispose();
  assert.deepEqual(await namesIn(container, "batch101"), []);
});

check("a query in one partition takes parameters", async ({ container }) => {
  for (const partition of ["query", "query-other"]) {
    for (let position = 0; position < 6; position++) {
      await container.items.create(item(partition, `${position}`, { kind: position % 2 === 0 ? "even" : "odd", position }));
    }
  }
  const query = {
    query: "SELECT * FROM c WHERE c.kind = @kind AND c.position >= @position",
    parameters: [{ name: "@kind", value: "even" }, { name: "@position", value: 2 }],
  };
  const rows = await ask(container, query, { partitionKey: "query" });
  assert.deepEqual(rows.map((row) => [row.instanceId, row.id]).sort(), [["query", "2"], ["query", "4"]]);
});

check("strings stand in single quotes", async ({ container }) => {
  await container.items.create(item("single", "a"));
  const text = "SELECT * FROM c WHERE c.instanceId = 'single'";
  for (const options of [{}, { forceQueryPlan: true }, { partitionKey: "single" }]) {
    assert.deepEqual(ids(await ask(container, text, options)), ["a"]);
  }
});

check("strings stand in double quotes", async ({ container }) => {
  await container.items.create(item("double", "a"));
  const text = 'SELECT * FROM c WHERE c.instanceId = "double"';
  for (const options of [{}, { forceQueryPlan: true }, { partitionKey: "double" }]) {
    assert.deepEqual(ids(await ask(container, text, options)), ["a"]);
  }
});

check("pages across partitions have each row once", async ({ container }) => {
  const text = "SELECT * FROM c WHERE c.kind = 'spread'";
  // First the account visits the partitions one by one, then the client does.
  for (const how of [{}, { enableQueryControl: true }]) {
    const found = [];
    let continuationToken;
    let pages = 0;
    do {
      // Each page is a separate query, so only the token determines where it begins.
      const query = container.items.query(text, { maxItemCount: 3, continuationToken, ...how });
      const page = await query.fetchNext();
      assert.ok(page.resources.length <= 3, `a page has ${page.resources.length} rows`);
      found.push(...ids(page.resources));
      continuationToken = page.continuationToken;
      pages += 1;
    } while (continuationToken);
    assert.deepEqual(found.sort(), RANKS.map((n) => `row${n}`).sort());
    assert.ok(pages > ROWS / 3, `${ROWS} rows came in ${pages} pages`);
  }
});

check("rows across partitions come in ascending order", async ({ container }) => {
  const text = "SELECT * FROM c WHERE c.kind = 'spread' ORDER BY c.position";
  for (const forceQueryPlan of [false, true]) {
    const rows = await ask(container, text, { maxItemCount: 3, forceQueryPlan });
    assert.deepEqual(rows.map((row) => row.position), RANKS);
  }
});

check("rows across partitions come in descending order", async ({ container }) => {
  const text = "SELECT * FROM c WHERE c.kind = 'spread' ORDER BY c.position DESC";
  for (const forceQueryPlan of [false, true]) {
    const rows = await ask(container, text, { maxItemCount: 3, forceQueryPlan });
    assert.deepEqual(rows.map((row) => row.position), [...RANKS].reverse());
  }
});

check("rows across partitions are counted", async ({ container }) => {
  // The client must not plan this query: the SDK's emulator plans no aggregates.
  const rows = await ask(container, "SELECT VALUE COUNT(1) FROM c WHERE c.kind = 'spread'");
  assert.deepEqual(rows, [ROWS]);
});

check("a reserved word after a dot is refused", async ({ container }) => {
  await container.items.create(item("reserved", "a", { by: "me" }));
  for (const options of [{ partitionKey: "reserved" }, {}, { forceQueryPlan: true }]) {
    await refused(400, () => container.items.query("SELECT c.by FROM c", options).fetchAll());
  }
});

check("a reserved word stands in brackets", async ({ container }) => {
  await container.items.create(item("brackets", "a", { by: "me" }));
  const one = await ask(container, 'SELECT c["by"] FROM c', { partitionKey: "brackets" });
  assert.deepEqual(one, [{ by: "me" }]);
  const text = "SELECT VALUE c[\"by\"] FROM c WHERE c.instanceId = 'brackets'";
  for (const forceQueryPlan of [false, true]) assert.deepEqual(await ask(container, text, { forceQueryPlan }), ["me"]);
});

check("a filter on an unindexed path is refused", async ({ container }) => {
  await container.items.create(item("unindexed", "a", { note: "n" }));
  for (const options of [{ partitionKey: "unindexed" }, {}, { forceQueryPlan: true }]) {
    await refused(400, () => container.items.query("SELECT * FROM c WHERE c.note = 'n'", options).fetchAll());
  }
});

check("a scan filters on an unindexed path", async ({ container }) => {
  await container.items.create(item("scan", "a", { note: "scanned" }));
  for (const options of [{ partitionKey: "scan" }, {}, { forceQueryPlan: true }]) {
    const scan = { enableScanInQuery: true, ...options };
    assert.deepEqual(ids(await ask(container, "SELECT * FROM c WHERE c.note = 'scanned'", scan)), ["a"]);
  }
});

check("answers name their request charge", async ({ container }) => {
  const created = await container.items.create(item("charge", "a"));
  const found = await container.item("a", "charge").read();
  const batch = await container.items.batch([upsert(item("charge", "b"))], "charge");
  const rows = await container.items.query("SELECT * FROM c", { partitionKey: "charge" }).fetchAll();
  const charges = [
    created.requestCharge,
    found.requestCharge,
    Number(batch.headers["x-ms-request-charge"]),
    rows.requestCharge,
  ];
  assert.ok(charges.every((charge) => charge > 0), `${charges}`);
});

check("a wrong key is refused", async () => {
  const client = new CosmosClient({ endpoint, key: "d3Jvbmc=" });
  await refused(401, () => client.database(DATABASE).read());
  client.dispose();
});

/** Creates the database and a container with rows in many partitions. */
async function prepare(client) {
  const { database } = await client.databases.create({ id: DATABASE });
  const settings = { id: "items", partitionKey: PARTITION_KEY, indexingPolicy: INDEXING, defaultTtl: -1 };
  const { container } = await database.containers.create(settings);
  for (const n of RANKS) {
    // Neighbours in position are in different partitions: 7 and 20 have no common factor.
    await container.items.create(item(`spread${(n * 7) % 20}`, `row${n}`, { kind: "spread", position: n }));
  }
  return container;
}

const client = new CosmosClient({ endpoint, key });
const container = await prepare(client);
let failures = 0;
for (const { name, run } of checks) {
  try {
    await run({ client, container });
    console.log(`ok ${name}`);
  } catch (error) {
    // A failed check must not hide the others.
    failures += 1;
    console.log(`FAILED ${name}`);
    console.error(`${name}: ${error.stack ?? error}`);
  }
}
client.dispose();
process.exitCode = failures > 0 ? 1 : 0;
