//! Key-value pairs of ten megabytes, written by one execution. Clients see them at once. The execution reads them from
//! its own history, and the next execution finds them in its snapshot.

use crate::fixture::*;
use duroxide::{
    providers::{ExecutionMetadata, Provider},
    runtime::{registry::ActivityRegistry, Runtime},
    Client, Event, EventKind, OrchestrationContext, OrchestrationRegistry, OrchestrationStatus,
};
use duroxide_cosmos::CosmosDBProvider;
use std::sync::Arc;

const KEYS: usize = 150;

const VALUE: usize = 64 * 1024;

fn key(n: usize) -> String {
    format!("key/{n}")
}

fn value(n: usize) -> String {
    (n % 10).to_string().repeat(VALUE)
}

/// A value that is small enough for the runtime's turn lock of five seconds, with an emulator on a busy machine.
fn small(n: usize) -> String {
    (n % 10).to_string().repeat(1_024)
}

/// The first events of an execution: it starts and writes every key.
fn writes(instance: &str, execution: u64) -> Vec<Event> {
    let mut events = vec![started(instance, execution)];
    events.extend((0..KEYS).map(|n| {
        let kind = EventKind::KeyValueSet { key: key(n), value: value(n), last_updated_at_ms: 1_000 + n as u64 };
        event(instance, execution, 2 + n as u64, kind)
    }));
    events
}

/// Clients see all values, with both calls.
async fn clients_see_all(provider: &CosmosDBProvider) {
    let all = provider.get_kv_all_values("i").await.unwrap();
    assert_eq!(all.len(), KEYS);
    for n in 0..KEYS {
        assert_eq!(all[&key(n)], value(n));
    }
    assert_eq!(provider.get_kv_value("i", &key(149)).await.unwrap(), Some(value(149)));
    assert_eq!(provider.get_kv_value("i", "key/150").await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_see_values_at_once_and_the_snapshot_gets_them_when_the_execution_ends() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    a.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert!(item.kv_snapshot.is_empty());
    commit(&a, &token, writes("i", 1), Vec::new(), Vec::new(), running()).await.unwrap();
    clients_see_all(&a).await;
    clients_see_all(&b).await;

    // The next turn of the same execution, in the process that committed the last turn and in another one.
    for provider in [&a, &b] {
        provider.enqueue_for_orchestrator(external("i", "news"), None).await.unwrap();
        let (item, token, _) = next_turn(provider, LONG).await;
        assert_eq!(item.history.len(), 1 + KEYS);
        assert!(item.kv_snapshot.is_empty(), "what the execution wrote comes from its own history");
        provider.abandon_orchestration_item(&token, None, true).await.unwrap();
    }
    let (_, token, _) = next_turn(&b, LONG).await;
    let last = vec![completed("i", 1, 2 + KEYS as u64)];
    commit(&b, &token, last, Vec::new(), vec![continue_as_new("i")], ended("ContinuedAsNew")).await.unwrap();

    // The next execution begins with the values, in any process.
    for provider in [&a, &b] {
        let (item, token, _) = next_turn(provider, LONG).await;
        assert_eq!(item.kv_snapshot.len(), KEYS);
        assert_eq!(item.kv_snapshot[&key(7)].value, value(7));
        assert_eq!(item.kv_snapshot[&key(7)].last_updated_at_ms, 1_007);
        provider.abandon_orchestration_item(&token, None, true).await.unwrap();
    }
    let (_, token, _) = next_turn(&a, LONG).await;
    let overwrite = EventKind::KeyValueSet { key: key(0), value: "new".to_owned(), last_updated_at_ms: 9_000 };
    let cleared = EventKind::KeyValueCleared { key: key(1) };
    let events = vec![started("i", 2), event("i", 2, 2, overwrite), event("i", 2, 3, cleared)];
    commit(&a, &token, events, Vec::new(), Vec::new(), running()).await.unwrap();

    // Clients see the change. The snapshot of the running execution stays as it was at its start.
    assert_eq!(b.get_kv_value("i", &key(0)).await.unwrap().as_deref(), Some("new"));
    assert_eq!(b.get_kv_value("i", &key(1)).await.unwrap(), None);
    assert_eq!(b.get_kv_all_values("i").await.unwrap().len(), KEYS - 1);
    b.enqueue_for_orchestrator(external("i", "news"), None).await.unwrap();
    let (item, _, _) = next_turn(&b, LONG).await;
    assert_eq!(item.kv_snapshot.len(), KEYS);
    assert_eq!(item.kv_snapshot[&key(0)].value, value(0));
    assert_eq!(item.kv_snapshot[&key(1)].value, value(1));
    let stats = a.get_instance_stats("i").await.unwrap().unwrap();
    assert_eq!(stats.kv_user_key_count, KEYS as u64 - 1);
    assert_eq!(stats.kv_total_value_bytes, (VALUE * (KEYS - 2) + 3) as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_orchestration_writes_as_many_keys_as_it_may_and_its_next_execution_reads_them() {
    let fixture = Fixture::new(1);
    let provider = Arc::new(fixture.provider("a").await);
    let orchestrations = OrchestrationRegistry::builder()
        .register("Values", |context: OrchestrationContext, input: String| async move {
            if input == "write" {
                for n in 0..KEYS {
                    context.set_kv_value(key(n), small(n));
                }
                context.schedule_wait("go on").await;
                return context.continue_as_new("read").await;
            }
            let right = (0..KEYS).filter(|n| context.get_kv_value(&key(*n)) == Some(small(*n))).count();
            Ok(right.to_string())
        })
        .build();
    let activities = ActivityRegistry::builder().build();
    let runtime = Runtime::start_with_store(provider.clone(), activities, orchestrations).await;
    let client = Client::new(provider.clone());
    client.start_orchestration("i", "Values", "write").await.unwrap();
    client.wait_for_kv_value("i", &key(KEYS - 1), PATIENCE).await.unwrap();
    assert_eq!(client.get_kv_all_values("i").await.unwrap().len(), KEYS);
    client.raise_event("i", "go on", "").await.unwrap();
    match client.wait_for_orchestration("i", PATIENCE).await.unwrap() {
        OrchestrationStatus::Completed { output, .. } => assert_eq!(output, KEYS.to_string()),
        other => panic!("{other:?}"),
    }
    assert_eq!(client.get_kv_all_values("i").await.unwrap().len(), KEYS);
    runtime.shutdown(None).await;
}

const INSTANCE: &str = "i";

/// Runs one turn of an instance that writes these events.
async fn values(provider: &CosmosDBProvider, id: u64, kinds: Vec<EventKind>, metadata: ExecutionMetadata) {
    provider.enqueue_for_orchestrator(external(INSTANCE, "go on"), None).await.unwrap();
    let (item, token, _) = next_turn(provider, LONG).await;
    let execution = item.execution_id;
    let events = (id..).zip(kinds).map(|(id, kind)| event(INSTANCE, execution, id, kind)).collect();
    commit(provider, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cleared_key_leaves_no_document_once_its_execution_has_ended() {
    let set =
        |key: &str| EventKind::KeyValueSet { key: key.to_owned(), value: "value".to_owned(), last_updated_at_ms: 1 };
    let clear = |key: &str| EventKind::KeyValueCleared { key: key.to_owned() };
    let fixture = Fixture::new(1);
    let provider = fixture.provider("a").await;
    begin(&provider, INSTANCE, Vec::new(), Vec::new()).await;
    // The same execution sets and clears a key, in one turn and in two. No document is needed.
    values(&provider, 2, vec![set("a"), clear("a"), set("b"), set("kept")], running()).await;
    values(&provider, 6, vec![clear("b")], running()).await;
    assert_eq!(fixture.documents_of_type(INSTANCE, "kv").await.len(), 1);
    // Values of the previous execution stay in the snapshot until the next execution ends, cleared or not.
    provider.enqueue_for_orchestrator(external(INSTANCE, "end"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let end = vec![event(INSTANCE, 1, 7, EventKind::OrchestrationContinuedAsNew { input: "{}".to_owned() })];
    commit(&provider, &token, end, Vec::new(), vec![continue_as_new(INSTANCE)], ended("ContinuedAsNew")).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    commit(&provider, &token, vec![started(INSTANCE, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    values(&provider, 2, vec![EventKind::KeyValuesCleared], running()).await;
    assert_eq!(provider.get_kv_value(INSTANCE, "kept").await.unwrap(), None);
    provider.enqueue_for_orchestrator(external(INSTANCE, "read"), None).await.unwrap();
    let (item, token, _) = next_turn(&provider, LONG).await;
    assert!(item.kv_snapshot.contains_key("kept"));
    provider.abandon_orchestration_item(&token, None, true).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    commit(&provider, &token, vec![completed(INSTANCE, 2, 3)], Vec::new(), Vec::new(), ended("Completed"))
        .await
        .unwrap();
    assert!(fixture.documents_of_type(INSTANCE, "kv").await.is_empty());
}
