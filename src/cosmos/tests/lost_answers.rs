//! Writes whose answer is lost. The SDK repeats them, so their own first write may be the reason for a refusal.

use super::fixture::{both_ways, cut_short, done, in_time, note, refuse, StoreFixture, SHORT};
use crate::cosmos::{Applied, BatchOutcome, Deadline, Refusal, StoreError, WriteOutcome};
use crate::model::Operation;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction};

both_ways!(
    a_create_whose_answer_is_lost_shows_as_exists_until_a_read,
    a_conditional_replace_whose_answer_is_lost_shows_as_stale_until_a_read,
    a_stale_replace_is_distinguished_from_one_that_may_be_its_own,
    a_create_that_exists_is_distinguished_from_one_that_may_be_its_own,
    a_replace_without_condition_returns_the_stored_etag,
    an_upsert_without_condition_returns_the_stored_etag,
    a_delete_whose_answer_is_lost_shows_as_absent,
    a_conditional_batch_whose_answer_is_lost_shows_as_rolled_back_until_a_read,
    a_creating_batch_whose_answer_is_lost_shows_as_rolled_back_until_a_read,
    writes_whose_answers_are_all_lost_have_an_unknown_outcome_until_a_read,
    a_write_that_takes_longer_than_its_deadline_has_an_unknown_outcome_until_a_read,
);

async fn a_create_whose_answer_is_lost_shows_as_exists_until_a_read(fixture: StoreFixture) {
    let note = note("i", "a", "mine");
    let lost = fixture.next(1, RequestKind::Create, WireAction::LoseAnswer);
    let outcome = fixture.store.create(&note.instance_id, &note.id, &note, in_time()).await.unwrap();
    assert_eq!(outcome, WriteOutcome::Refused(Refusal::Exists));
    assert_eq!(lost.hits(), 1);
    assert_eq!(fixture.text(&note).await.as_deref(), Some("mine"));
}

async fn a_conditional_replace_whose_answer_is_lost_shows_as_stale_until_a_read(fixture: StoreFixture) {
    let first = note("i", "a", "one");
    let etag = fixture.given(&first).await;
    let mine = first.with_text("mine");
    let lost = fixture.next(1, RequestKind::Replace, WireAction::LoseAnswer);
    let outcome = fixture.store.replace(&mine.instance_id, &mine.id, &mine, Some(&etag), in_time()).await.unwrap();
    assert_eq!(outcome, WriteOutcome::Refused(Refusal::Stale));
    assert_eq!(lost.hits(), 1);
    let stored = fixture.stored(&first).await.unwrap();
    assert_eq!(stored.document, mine);
    assert_ne!(stored.etag, etag);
    // The ETag of the read is valid for the next write.
    let next = first.with_text("next");
    done(fixture.store.replace(&next.instance_id, &next.id, &next, Some(&stored.etag), in_time()).await);
}

async fn a_stale_replace_is_distinguished_from_one_that_may_be_its_own(fixture: StoreFixture) {
    let first = note("i", "a", "one");
    let etag = fixture.given(&first).await;
    let mine = first.with_text("mine");
    let (partition, store) = (&mine.instance_id, &fixture.store);
    let (id, mine) = (&mine.id, &mine);
    let replace = |etag| async move { store.replace_noting_repeats(partition, id, mine, Some(&etag), in_time()).await };

    let lost = fixture.next(1, RequestKind::Replace, WireAction::LoseAnswer);
    let stale = WriteOutcome::Refused(Refusal::Stale);
    assert_eq!(replace(etag.clone()).await.unwrap(), (stale.clone(), Applied::Perhaps), "the SDK sent it twice");
    assert_eq!(lost.hits(), 1);

    assert_eq!(replace(etag.clone()).await.unwrap(), (stale.clone(), Applied::No), "somebody else's");

    // A throttled attempt is never applied, however often it is repeated.
    let throttled = fixture.next(2, RequestKind::Replace, refuse(429));
    assert_eq!(replace(etag.clone()).await.unwrap(), (stale.clone(), Applied::No));
    assert_eq!(throttled.hits(), 2);

    // A failed attempt may have been applied.
    fixture.next(9, RequestKind::Replace, refuse(503));
    assert_eq!(replace(etag).await.unwrap(), (stale, Applied::Perhaps));

    let now = fixture.stored(&first).await.unwrap().etag;
    let (outcome, applied) = replace(now).await.unwrap();
    assert!(matches!(outcome, WriteOutcome::Done(_)) && applied == Applied::No, "{outcome:?}");
}

async fn a_create_that_exists_is_distinguished_from_one_that_may_be_its_own(fixture: StoreFixture) {
    let note = note("i", "a", "mine");
    let exists = WriteOutcome::Refused(Refusal::Exists);
    let create = || fixture.store.create_noting_repeats(&note.instance_id, &note.id, &note, in_time());
    fixture.next(1, RequestKind::Create, WireAction::LoseAnswer);
    assert_eq!(create().await.unwrap(), (exists.clone(), Applied::Perhaps));
    assert_eq!(create().await.unwrap(), (exists, Applied::No));
}

async fn a_replace_without_condition_returns_the_stored_etag(fixture: StoreFixture) {
    let first = note("i", "a", "one");
    fixture.given(&first).await;
    let mine = first.with_text("mine");
    let lost = fixture.next(2, RequestKind::Replace, WireAction::LoseAnswer);
    let etag = done(fixture.store.replace(&mine.instance_id, &mine.id, &mine, None, in_time()).await);
    assert_eq!(lost.hits(), 2);
    let stored = fixture.stored(&first).await.unwrap();
    assert_eq!((stored.document, stored.etag), (mine, etag));
}

async fn an_upsert_without_condition_returns_the_stored_etag(fixture: StoreFixture) {
    let mine = note("i", "a", "mine");
    let lost = fixture.next(2, RequestKind::Upsert, WireAction::LoseAnswer);
    let etag = done(fixture.store.upsert(&mine.instance_id, &mine.id, &mine, None, in_time()).await);
    assert_eq!(lost.hits(), 2);
    assert_eq!(fixture.stored(&mine).await.unwrap().etag, etag);
}

async fn a_delete_whose_answer_is_lost_shows_as_absent(fixture: StoreFixture) {
    let note = note("i", "a", "one");
    for condition in [false, true] {
        let etag = fixture.given(&note).await;
        let lost = fixture.next(1, RequestKind::Delete, WireAction::LoseAnswer);
        let if_match = condition.then_some(&etag);
        let outcome = fixture.store.delete(&note.instance_id, &note.id, if_match, in_time()).await.unwrap();
        assert_eq!(outcome, WriteOutcome::Refused(Refusal::Absent));
        assert_eq!(lost.hits(), 1);
        assert!(fixture.stored(&note).await.is_none());
    }
}

async fn a_conditional_batch_whose_answer_is_lost_shows_as_rolled_back_until_a_read(fixture: StoreFixture) {
    let (fence, other) = (note("i", "fence", "one"), note("i", "other", ""));
    let etag = fixture.given(&fence).await;
    let mine = fence.with_text("mine");
    let operations =
        [Operation::replace(mine.id.clone(), &mine, Some(&etag)).unwrap(), Operation::create(&other).unwrap()];
    let lost = fixture.next(1, RequestKind::Batch, WireAction::LoseAnswer);
    let outcome = fixture.store.batch(&fence.instance_id, &operations, in_time()).await.unwrap();
    assert!(matches!(&outcome, BatchOutcome::RolledBack(back) if (back.index, back.status) == (0, 412)), "{outcome:?}");
    assert_eq!(lost.hits(), 1);
    assert_eq!(fixture.text(&fence).await.as_deref(), Some("mine"));
    assert!(fixture.stored(&other).await.is_some());
}

async fn a_creating_batch_whose_answer_is_lost_shows_as_rolled_back_until_a_read(fixture: StoreFixture) {
    let note = note("i", "a", "mine");
    let lost = fixture.next(1, RequestKind::Batch, WireAction::LoseAnswer);
    let operations = [Operation::create(&note).unwrap()];
    let outcome = fixture.store.batch(&note.instance_id, &operations, in_time()).await.unwrap();
    assert!(matches!(&outcome, BatchOutcome::RolledBack(back) if (back.index, back.status) == (0, 409)), "{outcome:?}");
    assert_eq!(lost.hits(), 1);
    assert_eq!(fixture.text(&note).await.as_deref(), Some("mine"));
}

async fn writes_whose_answers_are_all_lost_have_an_unknown_outcome_until_a_read(fixture: StoreFixture) {
    let (made, changed, gone, batched) =
        (note("i", "made", "mine"), note("i", "changed", "one"), note("i", "gone", ""), note("i", "batched", "mine"));
    let changed_etag = fixture.given(&changed).await;
    fixture.given(&gone).await;
    let mine = changed.with_text("mine");
    for kind in [RequestKind::Create, RequestKind::Replace, RequestKind::Delete, RequestKind::Batch] {
        fixture.on(kind, WireAction::LoseAnswer);
    }

    let (store, partition, soon) = (&fixture.store, &made.instance_id, || Deadline::after(SHORT));
    let operations = [Operation::create(&batched).unwrap()];
    for error in [
        cut_short(store.create(partition, &made.id, &made, soon())).await.unwrap_err(),
        cut_short(store.replace(partition, &mine.id, &mine, Some(&changed_etag), soon())).await.unwrap_err(),
        cut_short(store.delete(partition, &gone.id, None, soon())).await.unwrap_err(),
        cut_short(store.batch(partition, &operations, soon())).await.unwrap_err(),
    ] {
        assert!(matches!(&error, StoreError::OutcomeUnknown { .. }), "{error:?}");
        assert!(error.is_retryable());
    }
    assert_eq!(fixture.text(&made).await.as_deref(), Some("mine"));
    assert_eq!(fixture.text(&changed).await.as_deref(), Some("mine"));
    assert_eq!(fixture.text(&gone).await, None);
    assert_eq!(fixture.text(&batched).await.as_deref(), Some("mine"));
}

async fn a_write_that_takes_longer_than_its_deadline_has_an_unknown_outcome_until_a_read(fixture: StoreFixture) {
    let note = note("i", "a", "mine");
    let gate = Gate::new();
    let rule = fixture.on(RequestKind::Batch, WireAction::HoldAfter(gate.clone()));
    let operations = [Operation::create(&note).unwrap()];
    let outcome = cut_short(fixture.store.batch(&note.instance_id, &operations, Deadline::after(SHORT))).await;
    assert!(matches!(outcome, Err(StoreError::OutcomeUnknown { .. })), "{outcome:?}");
    assert_eq!(rule.hits(), 1);
    assert_eq!(fixture.text(&note).await.as_deref(), Some("mine"));
    gate.open();
}
