//! Point operations with and without a condition, and their refusals.

use super::fixture::{both_ways, done, in_time, note, StoreFixture};
use crate::{
    cosmos::{Freshness, Refusal, StoreError, Versioned, WriteOutcome},
    model::operation::MAX_BYTES,
};
use azure_core::http::Etag;
use duroxide_cosmos_emulator::RequestKind;
use serde_json::Value;

both_ways!(
    a_created_document_is_read_back_with_its_etag,
    a_missing_document_reads_as_none,
    the_same_id_in_two_partitions_is_two_documents,
    a_second_create_is_refused_and_changes_nothing,
    a_replace_without_condition_replaces_any_version,
    a_replace_is_applied_if_its_condition_holds_and_refused_otherwise,
    a_replace_of_a_missing_document_is_refused_as_absent,
    an_upsert_creates_and_replaces,
    an_upsert_is_refused_if_its_condition_does_not_hold,
    a_delete_is_applied_once,
    a_delete_is_refused_if_its_condition_does_not_hold,
    names_of_any_characters_are_stored_and_found,
    a_document_over_the_limit_is_refused_with_its_size_before_it_is_sent,
    a_document_just_under_the_limit_is_stored,
);

async fn a_created_document_is_read_back_with_its_etag(fixture: StoreFixture) {
    let note = note("i", "a", "one");
    let etag = fixture.given(&note).await;
    for freshness in [Freshness::Session, Freshness::Authoritative] {
        let read = fixture.store.read(&note.instance_id, &note.id, freshness, in_time()).await.unwrap();
        let Versioned { document, etag: read_etag } = read.unwrap();
        assert_eq!((document, read_etag), (note.clone(), etag.clone()), "{freshness:?}");
    }
}

async fn a_missing_document_reads_as_none(fixture: StoreFixture) {
    assert!(fixture.stored(&note("i", "a", "")).await.is_none());
}

async fn the_same_id_in_two_partitions_is_two_documents(fixture: StoreFixture) {
    let (here, there) = (note("i", "a", "here"), note("j", "a", "there"));
    fixture.given(&here).await;
    fixture.given(&there).await;
    assert_eq!(fixture.text(&here).await.as_deref(), Some("here"));
    assert_eq!(fixture.text(&there).await.as_deref(), Some("there"));
}

async fn a_second_create_is_refused_and_changes_nothing(fixture: StoreFixture) {
    let first = note("i", "a", "one");
    let etag = fixture.given(&first).await;
    let second = first.with_text("two");
    let outcome = fixture.store.create(&second.instance_id, &second.id, &second, in_time()).await.unwrap();
    assert_eq!(outcome, WriteOutcome::Refused(Refusal::Exists));
    assert_eq!(fixture.stored(&first).await.unwrap().etag, etag);
}

async fn a_replace_without_condition_replaces_any_version(fixture: StoreFixture) {
    let first = note("i", "a", "one");
    let old = fixture.given(&first).await;
    let second = first.with_text("two");
    let new = done(fixture.store.replace(&second.instance_id, &second.id, &second, None, in_time()).await);
    assert_ne!(old, new);
    let stored = fixture.stored(&first).await.unwrap();
    assert_eq!((stored.document, stored.etag), (second, new));
}

async fn a_replace_is_applied_if_its_condition_holds_and_refused_otherwise(fixture: StoreFixture) {
    let first = note("i", "a", "one");
    let old = fixture.given(&first).await;
    let second = first.with_text("two");
    let new = done(fixture.store.replace(&second.instance_id, &second.id, &second, Some(&old), in_time()).await);

    let third = first.with_text("three");
    let late = fixture.store.replace(&third.instance_id, &third.id, &third, Some(&old), in_time()).await;
    assert_eq!(late.unwrap(), WriteOutcome::Refused(Refusal::Stale));
    let stored = fixture.stored(&first).await.unwrap();
    assert_eq!((stored.document, stored.etag), (second, new));
}

async fn a_replace_of_a_missing_document_is_refused_as_absent(fixture: StoreFixture) {
    let note = note("i", "a", "one");
    for condition in [None, Some(Etag::from("\"some\""))] {
        let outcome =
            fixture.store.replace(&note.instance_id, &note.id, &note, condition.as_ref(), in_time()).await.unwrap();
        assert_eq!(outcome, WriteOutcome::Refused(Refusal::Absent), "{condition:?}");
    }
    assert!(fixture.stored(&note).await.is_none());
}

async fn an_upsert_creates_and_replaces(fixture: StoreFixture) {
    let first = note("i", "a", "one");
    let created = done(fixture.store.upsert(&first.instance_id, &first.id, &first, None, in_time()).await);
    assert_eq!(fixture.stored(&first).await.unwrap().etag, created);
    let second = first.with_text("two");
    let replaced = done(fixture.store.upsert(&second.instance_id, &second.id, &second, None, in_time()).await);
    assert_ne!(created, replaced);
    assert_eq!(fixture.text(&first).await.as_deref(), Some("two"));
}

async fn an_upsert_is_refused_if_its_condition_does_not_hold(fixture: StoreFixture) {
    let first = note("i", "a", "one");
    let old = fixture.given(&first).await;
    let second = first.with_text("two");
    done(fixture.store.upsert(&second.instance_id, &second.id, &second, Some(&old), in_time()).await);
    let third = first.with_text("three");
    let late = fixture.store.upsert(&third.instance_id, &third.id, &third, Some(&old), in_time()).await;
    assert_eq!(late.unwrap(), WriteOutcome::Refused(Refusal::Stale));
    assert_eq!(fixture.text(&first).await.as_deref(), Some("two"));
}

async fn a_delete_is_applied_once(fixture: StoreFixture) {
    let note = note("i", "a", "one");
    fixture.given(&note).await;
    done(fixture.store.delete(&note.instance_id, &note.id, None, in_time()).await);
    assert!(fixture.stored(&note).await.is_none());
    let again = fixture.store.delete(&note.instance_id, &note.id, None, in_time()).await.unwrap();
    assert_eq!(again, WriteOutcome::Refused(Refusal::Absent));
}

async fn a_delete_is_refused_if_its_condition_does_not_hold(fixture: StoreFixture) {
    let first = note("i", "a", "one");
    let old = fixture.given(&first).await;
    let second = first.with_text("two");
    let new = done(fixture.store.replace(&second.instance_id, &second.id, &second, Some(&old), in_time()).await);
    let late = fixture.store.delete(&first.instance_id, &first.id, Some(&old), in_time()).await.unwrap();
    assert_eq!(late, WriteOutcome::Refused(Refusal::Stale));
    assert_eq!(fixture.text(&first).await.as_deref(), Some("two"));
    done(fixture.store.delete(&first.instance_id, &first.id, Some(&new), in_time()).await);
    assert!(fixture.stored(&first).await.is_none());
}

async fn names_of_any_characters_are_stored_and_found(fixture: StoreFixture) {
    for name in ["a/b", "a\\b", "a?b#c", "", "🦀 ü", "$d:metrics", "%2F", "\"quoted\""] {
        let note = note(name, name, name);
        fixture.given(&note).await;
        assert_eq!(fixture.text(&note).await.as_deref(), Some(name));
    }
}

async fn a_document_over_the_limit_is_refused_with_its_size_before_it_is_sent(fixture: StoreFixture) {
    let note = note("i", "big", "x".repeat(3_000_000));
    let (store, partition, id) = (&fixture.store, &note.instance_id, &note.id);
    for outcome in [
        store.create(partition, id, &note, in_time()).await,
        store.replace(partition, id, &note, None, in_time()).await,
        store.upsert(partition, id, &note, None, in_time()).await,
    ] {
        let error = outcome.unwrap_err();
        assert!(matches!(&error, StoreError::TooLarge { bytes: 3_000_000.., limit: MAX_BYTES, .. }), "{error:?}");
        assert!(error.is_unstorable() && !error.is_retryable());
        let text = error.to_string();
        assert!(text.contains("note:big") && text.contains("bytes") && text.contains(&MAX_BYTES.to_string()), "{text}");
    }
    let stats = fixture.account.stats();
    let sent = [RequestKind::Create, RequestKind::Replace, RequestKind::Upsert].map(|kind| stats.of(kind).requests);
    assert_eq!(sent, [0, 0, 0]);
}

async fn a_document_just_under_the_limit_is_stored(fixture: StoreFixture) {
    let empty = serde_json::to_string(&note("i", "big", "")).unwrap();
    let note = note("i", "big", "x".repeat(MAX_BYTES - empty.len()));
    assert_eq!(serde_json::to_string(&note).unwrap().len(), MAX_BYTES);
    let fixture = fixture.patient();
    fixture.given(&note).await;
    let stored: Versioned<Value> =
        fixture.store.read(&note.instance_id, &note.id, Freshness::Session, in_time()).await.unwrap().unwrap();
    assert_eq!(stored.document["name"].as_str().map(str::len), Some(note.text.len()));
}
