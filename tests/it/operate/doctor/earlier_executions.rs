//! The doctor notices lost values and lost history of earlier executions.

use super::*;
use crate::fixture::*;
use duroxide::{providers::Provider, Event, EventKind};
use duroxide_cosmos::{operate::Reason, CosmosDBProvider};
use serde_json::json;

fn set(execution: u64, id: u64, key: &str, value: &str) -> Event {
    let (key, value) = (key.to_owned(), value.to_owned());
    event("i", execution, id, EventKind::KeyValueSet { key, value, last_updated_at_ms: 1_000 * execution })
}

/// Makes an instance in its third execution. The first two executions ran two turns each.
async fn third_execution(provider: &CosmosDBProvider) {
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    for execution in 1..=3 {
        let (_, token, _) = next_turn(provider, LONG).await;
        let mut events = vec![started("i", execution)];
        match execution {
            1 => events.extend([set(1, 2, "old", "1"), set(1, 3, "both", "1"), set(1, 4, "cleared", "1")]),
            2 => events.push(event("i", 2, 2, EventKind::KeyValueCleared { key: "cleared".to_owned() })),
            _ => events.extend([set(3, 2, "both", "3"), filler("i", 3, 3)]),
        }
        let next = events.len() as u64 + 1;
        commit(provider, &token, events, Vec::new(), Vec::new(), running()).await.unwrap();
        if execution < 3 {
            provider.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
            let (_, token, _) = next_turn(provider, LONG).await;
            let ends = EventKind::OrchestrationContinuedAsNew { input: "{}".to_owned() };
            let events = vec![event("i", execution, next, ends)];
            commit(provider, &token, events, Vec::new(), vec![continue_as_new("i")], ended("ContinuedAsNew"))
                .await
                .unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_value_of_an_earlier_execution_is_reported_and_restored() {
    let fixture = Fixture::new(1);
    third_execution(&fixture.provider("worker").await).await;
    let doctor = fixture.provider("doctor").await;
    assert_eq!(diagnose(&doctor, "i").await.findings, []);
    let values = fixture.documents_of_type("i", "kv").await;
    assert_eq!(values.len(), 2, "{values:?}");
    for value in &values {
        fixture.remove(value).await;
        repaired(&doctor, "i", Reason::LostValue).await;
    }
    let other = fixture.provider("other").await;
    other.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
    let (item, ..) = next_turn(&other, LONG).await;
    let mut snapshot: Vec<_> =
        item.kv_snapshot.iter().map(|(key, entry)| (key.as_str(), entry.value.as_str())).collect();
    snapshot.sort_unstable();
    assert_eq!(snapshot, [("both", "1"), ("old", "1")], "as the execution found them");
    assert_eq!(other.get_kv_value("i", "both").await.unwrap().as_deref(), Some("3"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_document_of_an_earlier_execution_is_reported() {
    let fixture = Fixture::new(1);
    third_execution(&fixture.provider("worker").await).await;
    let doctor = fixture.provider("doctor").await;
    let of = |execution: u64| {
        let fixture = &fixture;
        async move {
            let mut documents = fixture.documents_of_type("i", "history").await;
            documents.retain(|document| document["execution"] == execution);
            documents.sort_by_key(|document| document["first"].as_u64());
            documents
        }
    };
    // Removes either turn of the second execution. Its first turn cleared a value that the first execution had set. The
    // events of the first execution about that value no longer count.
    for turn in of(2).await {
        fixture.remove(&turn).await;
        let detail = left_to_the_operator(&doctor, "i", Reason::LostHistory).await;
        assert!(detail.contains("execution 2"), "{detail}");
        fixture.put(&turn).await;
        assert_eq!(diagnose(&doctor, "i").await.findings, []);
    }
    // Removes all of the first execution, with the document of its result.
    for document in of(1).await.iter().chain(&[json!({ "instanceId": "i", "id": "x:1" })]) {
        fixture.remove(document).await;
    }
    let detail = left_to_the_operator(&doctor, "i", Reason::LostHistory).await;
    assert!(detail.contains("1 of 3 executions"), "{detail}");
    // The doctor does not report an execution that was pruned.
    let other = Fixture::new(1);
    let provider = other.provider("worker").await;
    third_execution(&provider).await;
    let options = duroxide::providers::PruneOptions { keep_last: Some(2), ..Default::default() };
    assert_eq!(admin(&provider).prune_executions("i", options).await.unwrap().executions_deleted, 1);
    assert_eq!(diagnose(&other.provider("doctor").await, "i").await.findings, []);
}
