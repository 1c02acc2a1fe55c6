//! What the store counts is what the account saw.

use super::scene::{both_ways, cut_short, done, in_time, note, refuse, Scene, CLIENT, SHORT};
use crate::{
    store::{queries::QueryText, Deadline, Operation},
    OperationKind,
};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction};

both_ways!(
    requests_and_charge_are_summed_by_kind_as_the_account_counts_them,
    what_the_sdk_repeats_by_itself_is_counted,
    what_was_refused_and_ridden_out_is_counted,
    a_request_that_was_given_up_on_is_counted,
);

const NOTES: QueryText = QueryText::across("notes", 1_000, "SELECT * FROM c WHERE c.type = 'note'");

/// The account's name for what the store counts under these kinds.
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
fn assert_same_requests(scene: &Scene) {
    let (ours, theirs) = (scene.store.statistics(), scene.account.stats_of(CLIENT));
    for (kinds, kind) in KINDS {
        let requests: u64 = kinds.iter().map(|kind| ours.of(*kind).requests).sum();
        assert_eq!(requests, theirs.of(kind).requests, "{kind}");
    }
    assert_eq!(ours.requests(), theirs.items().requests);
}

async fn requests_and_charge_are_summed_by_kind_as_the_account_counts_them(scene: Scene) {
    let (first, store) = (note("i", "a", "one"), &scene.store);
    let (partition, id) = (&first.instance_id, &first.id);
    assert_eq!(store.statistics().requests(), 0);

    let etag = scene.given(&first).await;
    done(store.replace(partition, id, &first, Some(&etag), in_time()).await);
    store.replace(partition, id, &first, Some(&etag), in_time()).await.unwrap();
    done(store.upsert(partition, id, &first, None, in_time()).await);
    scene.given(&note("j", "b", "two")).await;
    store.create(partition, id, &first, in_time()).await.unwrap();
    scene.stored(&first).await;
    scene.stored(&note("i", "missing", "")).await;
    store.query_partition::<serde_json::Value>(partition, NOTES.statement(), in_time()).await.unwrap();
    store.query_container::<serde_json::Value>(NOTES.statement(), in_time()).await.unwrap();
    store.batch(partition, &[Operation::create(&note("i", "c", "")).unwrap()], in_time()).await.unwrap();
    store.batch(partition, &[Operation::create(&first).unwrap()], in_time()).await.unwrap();
    done(store.delete(partition, id, None, in_time()).await);

    assert_same_requests(&scene);
    let (ours, theirs) = (store.statistics(), scene.account.stats_of(CLIENT));
    for (kinds, kind) in KINDS {
        let charge: f64 = kinds.iter().map(|kind| ours.of(*kind).charge).sum();
        let expected = theirs.of(kind).charge;
        assert!(charge > 0.0 && (charge - expected).abs() < 0.01, "{kind}: {charge}, not {expected}");
    }
    assert!((ours.charge() - theirs.items().charge).abs() < 0.05);
    assert_eq!(ours.of(OperationKind::ContainerQuery).requests, 4);
    assert_eq!(ours.iter().map(|(_, of_kind)| of_kind.retried).sum::<u64>(), 0);
}

async fn what_the_sdk_repeats_by_itself_is_counted(scene: Scene) {
    let note = note("i", "a", "");
    scene.next(1, RequestKind::Create, WireAction::LoseAnswer);
    scene.store.create(&note.instance_id, &note.id, &note, in_time()).await.unwrap();
    let operations = [Operation::delete(note.id.clone(), None)];
    scene.next(1, RequestKind::Batch, WireAction::LoseAnswer);
    scene.store.batch(&note.instance_id, &operations, in_time()).await.unwrap();
    assert_eq!(scene.store.statistics().of(OperationKind::Create).requests, 2);
    assert_same_requests(&scene);
}

async fn what_was_refused_and_ridden_out_is_counted(scene: Scene) {
    scene.next(3, RequestKind::Create, refuse(429));
    scene.next(6, RequestKind::Query, refuse(503));
    let note = note("i", "a", "");
    scene.given(&note).await;
    scene.store.query_partition::<serde_json::Value>(&note.instance_id, NOTES.statement(), in_time()).await.unwrap();
    assert_same_requests(&scene);
    let statistics = scene.store.statistics();
    let creates = statistics.of(OperationKind::Create);
    assert_eq!((creates.requests, creates.throttled, creates.retried), (4, 3, 3));
    let queries = statistics.of(OperationKind::PartitionQuery);
    assert_eq!((queries.requests, queries.throttled), (7, 0));
    assert!(queries.retried >= 1);
}

async fn a_request_that_was_given_up_on_is_counted(scene: Scene) {
    let note = note("i", "a", "");
    let gate = Gate::new();
    scene.on(RequestKind::Create, WireAction::HoldBefore(gate.clone()));
    let outcome = cut_short(scene.store.create(&note.instance_id, &note.id, &note, Deadline::after(SHORT))).await;
    outcome.unwrap_err();
    gate.open();
    assert_same_requests(&scene);
}
