//! Consistency and priority of requests on the wire.

use super::fixture::{both_ways, in_time, note, Note, StoreFixture, CLIENT};
use crate::cosmos::{queries::QueryText, Freshness};
use duroxide_cosmos_emulator::RequestKind;
use std::sync::{Arc, Mutex};

both_ways!(
    reads_and_queries_ask_for_session_consistency_at_the_usual_priority,
    an_eventual_read_is_a_point_read_of_any_replica_with_low_priority,
    a_statement_sets_consistency_and_priority,
    a_query_has_the_same_options_on_every_page,
);

const NOTES: QueryText = QueryText::across("notes", 1_000, "SELECT * FROM c WHERE c.type = 'note'");

/// A request's method, consistency and priority.
type Sent = (String, Option<String>, Option<String>);

/// Records the reads and queries that are sent from now on.
fn sent(fixture: &StoreFixture) -> Arc<Mutex<Vec<Sent>>> {
    let sent = Arc::new(Mutex::new(Vec::new()));
    let seen = sent.clone();
    fixture.account.wire().observe(move |request, _| {
        let asks = matches!(request.kind, RequestKind::Read | RequestKind::Query);
        if asks && request.client == Some(CLIENT) {
            let header = |name| request.header(name).map(str::to_owned);
            let consistency = header("x-ms-cosmos-read-consistency-strategy");
            let priority = header("x-ms-cosmos-priority-level");
            seen.lock().unwrap().push((request.method.to_owned(), consistency, priority));
        }
    });
    sent
}

fn as_sent(method: &str, consistency: &str, priority: Option<&str>) -> Sent {
    (method.to_owned(), Some(consistency.to_owned()), priority.map(str::to_owned))
}

async fn reads_and_queries_ask_for_session_consistency_at_the_usual_priority(fixture: StoreFixture) {
    let note = note("i", "a", "");
    fixture.given(&note).await;
    let sent = sent(&fixture);
    fixture.store.read::<Note>(&note.instance_id, &note.id, Freshness::Session, in_time()).await.unwrap();
    fixture.store.query_partition::<Note>(&note.instance_id, NOTES.statement(), in_time()).await.unwrap();
    assert_eq!(*sent.lock().unwrap(), [as_sent("GET", "Session", None), as_sent("POST", "Session", None)]);
}

async fn an_eventual_read_is_a_point_read_of_any_replica_with_low_priority(fixture: StoreFixture) {
    let note = note("i", "a", "text");
    let etag = fixture.given(&note).await;
    let sent = sent(&fixture);
    let found = fixture.store.read_eventual::<Note>(&note.instance_id, &note.id, in_time()).await.unwrap().unwrap();
    assert_eq!((found.document, found.etag), (note.clone(), etag));
    assert_eq!(*sent.lock().unwrap(), [as_sent("GET", "Eventual", Some("Low"))]);
    let missing = super::fixture::note("i", "missing", "");
    assert!(fixture.store.read_eventual::<Note>(&missing.instance_id, &missing.id, in_time()).await.unwrap().is_none());
}

async fn a_statement_sets_consistency_and_priority(fixture: StoreFixture) {
    let partition = note("i", "a", "").instance_id;
    let sent = sent(&fixture);
    for (statement, consistency, priority) in [
        (NOTES.statement().latest_committed(), "LatestCommitted", None),
        (NOTES.statement().in_background(), "Session", Some("Low")),
        (NOTES.statement().latest_committed().in_background(), "LatestCommitted", Some("Low")),
        (NOTES.statement().in_background().latest_committed(), "LatestCommitted", Some("Low")),
    ] {
        fixture.store.query_partition::<Note>(&partition, statement, in_time()).await.unwrap();
        assert_eq!(std::mem::take(&mut *sent.lock().unwrap()), [as_sent("POST", consistency, priority)]);
    }
}

async fn a_query_has_the_same_options_on_every_page(fixture: StoreFixture) {
    for name in ["a", "b", "c"] {
        fixture.given(&note("i", name, "")).await;
    }
    let sent = sent(&fixture);
    let statement = NOTES.statement().latest_committed().in_background().in_pages_of(std::num::NonZeroU32::MIN);
    let found = fixture.store.query_container::<Note>(statement, in_time()).await.unwrap();
    assert_eq!(found.len(), 3);
    let sent = sent.lock().unwrap();
    assert!(sent.len() > 4, "{sent:?}");
    assert!(sent.iter().all(|sent| *sent == as_sent("POST", "LatestCommitted", Some("Low"))), "{sent:?}");
}
