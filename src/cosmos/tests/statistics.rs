//! The store counts the same requests as the account.

use super::fixture::{both_ways, cut_short, done, in_time, note, refuse, StoreFixture, CLIENT, SHORT};
use crate::model::Operation;
use crate::{
    cosmos::{queries::QueryText, Deadline},
    OperationKind,
};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction};

both_ways!(
    requests_and_charge_are_summed_by_kind_as_the_account_counts_them,
    requests_that_the_sdk_repeats_are_counted,
    refused_and_retried_requests_are_counted,
    a_request_without_an_answer_at_the_deadline_is_counted,
);

const NOTES: QueryText = QueryText::across("notes", 1_000, "SELECT * FROM c WHERE c.type = 'note'");

/// The kinds of the store, and the account's kind for the same requests.
const KINDS: [(&[OperationKind], RequestKind); 7] = [
    (&[OperationKind::Create], RequestKind::Create),
    (&[OperationKind::Read], RequestKind::Read),
    (&[OperationKind::Replace], RequestKind::Replace),
    (&[OperationKind::Upsert], RequestKind::Upsert),
    (&[OperationKind::Delete], RequestKind::Delete),
    (&[OperationKind::PartitionQuery, OperationKind::ContainerQuery], RequestKind::Query),
    (&[OperationKind::Batch], RequestKind::Batch),
];

#[track_caller]
fn assert_same_requests(fixture: &StoreFixture) {
    let (ours, theirs) = (fixture.store.statistics(), fixture.account.stats_of(CLIENT));
    for (kinds, kind) in KINDS {
        let requests: u64 = kinds.iter().map(|kind| ours.of(*kind).requests).sum();
        assert_eq!(requests, theirs.of(kind).requests, "{kind}");
    }
    assert_eq!(ours.requests(), theirs.items().requests);
}

async fn requests_and_charge_are_summed_by_kind_as_the_account_counts_them(fixture: StoreFixture) {
    let (first, store) = (note("i", "a", "one"), &fixture.store);
    let (partition, id) = (&first.instance_id, &first.id);
    assert_eq!(store.statistics().requests(), 0);

    let etag = fixture.given(&first).await;
    done(store.replace(partition, id, &first, Some(&etag), in_time()).await);
    store.replace(partition, id, &first, Some(&etag), in_time()).await.unwrap();
    done(store.upsert(partition, id, &first, None, in_time()).await);
    fixture.given(&note("j", "b", "two")).await;
    store.create(partition, id, &first, in_time()).await.unwrap();
    fixture.stored(&first).await;
    fixture.stored(&note("i", "missing", "")).await;
    store.query_partition::<serde_json::Value>(partition, NOTES.statement(), in_time()).await.unwrap();
    store.query_container::<serde_json::Value>(NOTES.statement(), in_time()).await.unwrap();
    store.batch(partition, &[Operation::create(&note("i", "c", "")).unwrap()], in_time()).await.unwrap();
    store.batch(partition, &[Operation::create(&first).unwrap()], in_time()).await.unwrap();
    done(store.delete(partition, id, None, in_time()).await);

    assert_same_requests(&fixture);
    let (ours, theirs) = (store.statistics(), fixture.account.stats_of(CLIENT));
    for (kinds, kind) in KINDS {
        let charge: f64 = kinds.iter().map(|kind| ours.of(*kind).charge).sum();
        let expected = theirs.of(kind).charge;
        assert!(charge > 0.0 && (charge - expected).abs() < 0.01, "{kind}: {charge}, not {expected}");
    }
    assert!((ours.charge() - theirs.items().charge).abs() < 0.05);
    assert_eq!(ours.of(OperationKind::ContainerQuery).requests, 4);
    assert_eq!(ours.iter().map(|(_, of_kind)| of_kind.retried).sum::<u64>(), 0);
}

async fn requests_that_the_sdk_repeats_are_counted(fixture: StoreFixture) {
    let note = note("i", "a", "");
    fixture.next(1, RequestKind::Create, WireAction::LoseAnswer);
    fixture.store.create(&note.instance_id, &note.id, &note, in_time()).await.unwrap();
    let operations = [Operation::delete(note.id.clone(), None)];
    fixture.next(1, RequestKind::Batch, WireAction::LoseAnswer);
    fixture.store.batch(&note.instance_id, &operations, in_time()).await.unwrap();
    assert_eq!(fixture.store.statistics().of(OperationKind::Create).requests, 2);
    assert_same_requests(&fixture);
}

async fn refused_and_retried_requests_are_counted(fixture: StoreFixture) {
    fixture.next(3, RequestKind::Create, refuse(429));
    fixture.next(6, RequestKind::Query, refuse(503));
    let note = note("i", "a", "");
    fixture.given(&note).await;
    fixture.store.query_partition::<serde_json::Value>(&note.instance_id, NOTES.statement(), in_time()).await.unwrap();
    assert_same_requests(&fixture);
    let statistics = fixture.store.statistics();
    let creates = statistics.of(OperationKind::Create);
    assert_eq!((creates.requests, creates.throttled, creates.retried), (4, 3, 3));
    let queries = statistics.of(OperationKind::PartitionQuery);
    assert_eq!((queries.requests, queries.throttled), (7, 0));
    assert!(queries.retried >= 1);
}

async fn a_request_without_an_answer_at_the_deadline_is_counted(fixture: StoreFixture) {
    let note = note("i", "a", "");
    let gate = Gate::new();
    fixture.on(RequestKind::Create, WireAction::HoldBefore(gate.clone()));
    let outcome = cut_short(fixture.store.create(&note.instance_id, &note.id, &note, Deadline::after(SHORT))).await;
    outcome.unwrap_err();
    gate.open();
    assert_same_requests(&fixture);
}
