//! Point operations: with and without a condition, and what the refusals are.

use super::scene::{both_ways, done, in_time, note, Scene};
use crate::store::{batch::MAX_BYTES, Freshness, Refusal, StoreError, Versioned, WriteOutcome};
use azure_core::http::Etag;
use duroxide_cosmos_emulator::RequestKind;
use serde_json::Value;

both_ways!(
    a_created_document_is_read_back_with_its_etag,
    a_document_that_is_not_there_reads_as_none,
    the_same_id_in_two_partitions_is_two_documents,
    a_second_create_is_refused_and_changes_nothing,
    a_replace_without_condition_replaces_whatever_is_there,
    a_replace_is_done_where_the_condition_holds_and_refused_where_it_does_not,
    a_replace_of_nothing_is_refused_as_absent,
    an_upsert_creates_and_replaces,
    an_upsert_with_a_condition_is_refused_where_it_does_not_hold,
    a_delete_is_done_once,
    a_delete_is_refused_where_its_condition_does_not_hold,
    names_of_any_characters_are_stored_and_found,
    a_document_over_the_limit_is_refused_with_its_size_before_it_is_sent,
    a_document_just_under_the_limit_is_stored,
);

async fn a_created_document_is_read_back_with_its_etag(scene: Scene) {
    let note = note("i", "a", "one");
    let etag = scene.given(&note).await;
    for freshness in [Freshness::Session, Freshness::Authoritative] {
        let read = scene.store.read(&note.instance_id, &note.id, freshness, in_time()).await.unwrap();
        let Versioned { document, etag: read_etag } = read.unwrap();
        assert_eq!((document, read_etag), (note.clone(), etag.clone()), "{freshness:?}");
    }
}

async fn a_document_that_is_not_there_reads_as_none(scene: Scene) {
    assert!(scene.stored(&note("i", "a", "")).await.is_none());
}

async fn the_same_id_in_two_partitions_is_two_documents(scene: Scene) {
    let (here, there) = (note("i", "a", "here"), note("j", "a", "there"));
    scene.given(&here).await;
    scene.given(&there).await;
    assert_eq!(scene.text(&here).await.as_deref(), Some("here"));
    assert_eq!(scene.text(&there).await.as_deref(), Some("there"));
}

async fn a_second_create_is_refused_and_changes_nothing(scene: Scene) {
    let first = note("i", "a", "one");
    let etag = scene.given(&first).await;
    let second = first.with_text("two");
    let outcome = scene.store.create(&second.instance_id, &second.id, &second, in_time()).await.unwrap();
    assert_eq!(outcome, WriteOutcome::Refused(Refusal::Exists));
    assert_eq!(scene.stored(&first).await.unwrap().etag, etag);
}

async fn a_replace_without_condition_replaces_whatever_is_there(scene: Scene) {
    let first = note("i", "a", "one");
    let old = scene.given(&first).await;
    let second = first.with_text("two");
    let new = done(scene.store.replace(&second.instance_id, &second.id, &second, None, in_time()).await);
    assert_ne!(old, new);
    let stored = scene.stored(&first).await.unwrap();
    assert_eq!((stored.document, stored.etag), (second, new));
}

async fn a_replace_is_done_where_the_condition_holds_and_refused_where_it_does_not(scene: Scene) {
    let first = note("i", "a", "one");
    let old = scene.given(&first).await;
    let second = first.with_text("two");
    let new = done(scene.store.replace(&second.instance_id, &second.id, &second, Some(&old), in_time()).await);

    let third = first.with_text("three");
    let late = scene.store.replace(&third.instance_id, &third.id, &third, Some(&old), in_time()).await;
    assert_eq!(late.unwrap(), WriteOutcome::Refused(Refusal::Stale));
    let stored = scene.stored(&first).await.unwrap();
    assert_eq!((stored.document, stored.etag), (second, new));
}

async fn a_replace_of_nothing_is_refused_as_absent(scene: Scene) {
    let note = note("i", "a", "one");
    for condition in [None, Some(Etag::from("\"some\""))] {
        let outcome =
            scene.store.replace(&note.instance_id, &note.id, &note, condition.as_ref(), in_time()).await.unwrap();
        assert_eq!(outcome, WriteOutcome::Refused(Refusal::Absent), "{condition:?}");
    }
    assert!(scene.stored(&note).await.is_none());
}

async fn an_upsert_creates_and_replaces(scene: Scene) {
    let first = note("i", "a", "one");
    let created = done(scene.store.upsert(&first.instance_id, &first.id, &first, None, in_time()).await);
    assert_eq!(scene.stored(&first).await.unwrap().etag, created);
    let second = first.with_text("two");
    let replaced = done(scene.store.upsert(&second.instance_id, &second.id, &second, None, in_time()).await);
    assert_ne!(created, replaced);
    assert_eq!(scene.text(&first).await.as_deref(), Some("two"));
}

async fn an_upsert_with_a_condition_is_refused_where_it_does_not_hold(scene: Scene) {
    let first = note("i", "a", "one");
    let old = scene.given(&first).await;
    let second = first.with_text("two");
    done(scene.store.upsert(&second.instance_id, &second.id, &second, Some(&old), in_time()).await);
    let third = first.with_text("three");
    let late = scene.store.upsert(&third.instance_id, &third.id, &third, Some(&old), in_time()).await;
    assert_eq!(late.unwrap(), WriteOutcome::Refused(Refusal::Stale));
    assert_eq!(scene.text(&first).await.as_deref(), Some("two"));
}

async fn a_delete_is_done_once(scene: Scene) {
    let note = note("i", "a", "one");
    scene.given(&note).await;
    done(scene.store.delete(&note.instance_id, &note.id, None, in_time()).await);
    assert!(scene.stored(&note).await.is_none());
    let again = scene.store.delete(&note.instance_id, &note.id, None, in_time()).await.unwrap();
    assert_eq!(again, WriteOutcome::Refused(Refusal::Absent));
}

async fn a_delete_is_refused_where_its_condition_does_not_hold(scene: Scene) {
    let first = note("i", "a", "one");
    let old = scene.given(&first).await;
    let second = first.with_text("two");
    let new = done(scene.store.replace(&second.instance_id, &second.id, &second, Some(&old), in_time()).await);
    let late = scene.store.delete(&first.instance_id, &first.id, Some(&old), in_time()).await.unwrap();
    assert_eq!(late, WriteOutcome::Refused(Refusal::Stale));
    assert_eq!(scene.text(&first).await.as_deref(), Some("two"));
    done(scene.store.delete(&first.instance_id, &first.id, Some(&new), in_time()).await);
    assert!(scene.stored(&first).await.is_none());
}

async fn names_of_any_characters_are_stored_and_found(scene: Scene) {
    for name in ["a/b", "a\\b", "a?b#c", "", "🦀 ü", "$d:metrics", "%2F", "\"quoted\""] {
        let note = note(name, name, name);
        scene.given(&note).await;
        assert_eq!(scene.text(&note).await.as_deref(), Some(name));
    }
}

async fn a_document_over_the_limit_is_refused_with_its_size_before_it_is_sent(scene: Scene) {
    let note = note("i", "big", "x".repeat(3_000_000));
    let (store, partition, id) = (&scene.store, &note.instance_id, &note.id);
    for outcome in [
        store.create(partition, id, &note, in_time()).await,
        store.replace(partition, id, &note, None, in_time()).await,
        store.upsert(partition, id, &note, None, in_time()).await,
    ] {
        let error = outcome.unwrap_err();
        assert!(matches!(&error, StoreError::TooLarge { bytes: 3_000_000.., limit: MAX_BYTES, .. }), "{error:?}");
        assert!(error.is_unstorable() && !error.is_passing());
        let text = error.to_string();
        assert!(text.contains("note:big") && text.contains("bytes") && text.contains(&MAX_BYTES.to_string()), "{text}");
    }
    let stats = scene.account.stats();
    let sent = [RequestKind::Create, RequestKind::Replace, RequestKind::Upsert].map(|kind| stats.of(kind).requests);
    assert_eq!(sent, [0, 0, 0]);
}

async fn a_document_just_under_the_limit_is_stored(scene: Scene) {
    let empty = serde_json::to_string(&note("i", "big", "")).unwrap();
    let note = note("i", "big", "x".repeat(MAX_BYTES - empty.len()));
    assert_eq!(serde_json::to_string(&note).unwrap().len(), MAX_BYTES);
    let scene = scene.patient();
    scene.given(&note).await;
    let stored: Versioned<Value> =
        scene.store.read(&note.instance_id, &note.id, Freshness::Session, in_time()).await.unwrap().unwrap();
    assert_eq!(stored.document["name"].as_str().map(str::len), Some(note.text.len()));
}
