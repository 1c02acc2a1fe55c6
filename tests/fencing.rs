//! A lock that was taken over, has expired or was given up changes nothing any more, whatever the clocks say.

#[path = "common/turns.rs"]
mod turns;

use duroxide::providers::{Provider, WorkItem};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction};
use serde_json::Value;
use std::{sync::Arc, time::Duration};
use turns::{
    activity_id, assert_refused, begun, cancelled, completion, external, fetch, fetch_now, fetch_work, raised, start,
    until, within, Delta, Site, LONG, SHORT,
};

const INSTANCE: &str = "order";

/// How the first owner's lock ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// Its time is up for everybody.
    Expires,
    /// The owner's clock is behind: it still believes in its lock.
    ExpiresForOthers,
}

/// How far the new owner has come when the former one is heard again.
#[derive(Clone, Copy, Debug, PartialEq)]
enum NewOwner {
    HasClaimed,
    HasCommitted,
}

/// An instance whose first turn "a" has fetched, and a provider "b" that will take it over.
struct Takeover {
    site: Site,
    a: Arc<CosmosDBProvider>,
    b: CosmosDBProvider,
    token: String,
    end: End,
}

impl Takeover {
    async fn prepare(end: End) -> Self {
        let site = Site::new().await;
        let (a, b) = (site.provider("a").await, site.provider("b").await);
        a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
        let lock = if matches!(end, End::Expires) { SHORT } else { LONG };
        let (_, token) = fetch(&a, lock).await;
        Self { site, a: Arc::new(a), b, token, end }
    }

    /// "b" takes the instance over, and commits where it is to; its token.
    async fn happens(&self, new_owner: NewOwner) -> String {
        if matches!(self.end, End::ExpiresForOthers) {
            self.site.expire_lock_for_others(INSTANCE).await;
        }
        let (item, token) = fetch(&self.b, LONG).await;
        assert_eq!(item.messages, [start(INSTANCE)]);
        assert_eq!(item.history, []);
        if new_owner == NewOwner::HasCommitted {
            new_turn().ack(&self.b, &token).await.expect("the new owner commits");
        }
        token
    }

    /// The new owner's turn is the only one there is, or can be.
    async fn is_the_new_owners(&self, token: &str, new_owner: NewOwner) {
        if new_owner == NewOwner::HasClaimed {
            new_turn().ack(&self.b, token).await.expect("the new owner commits");
        }
        for provider in [self.a.as_ref(), &self.site.provider("c").await] {
            assert_eq!(provider.read(INSTANCE).await.expect("a history"), new_turn().events);
            assert!(fetch_now(provider, LONG).await.is_none(), "a message was handled twice");
        }
        let work = self.site.documents_of(INSTANCE, "activity").await;
        assert_eq!(work.len(), new_turn().activities.len());
        assert!(self.site.documents_of(INSTANCE, "staged").await.is_empty());
    }
}

fn new_turn() -> Delta {
    let mut delta = Delta::start(INSTANCE, 2);
    // Times are set when an event is made: made once, they are the same everywhere.
    for event in &mut delta.events {
        event.timestamp_ms = 1;
    }
    delta
}

/// Which of the former owner's batches is on its way during the takeover.
#[derive(Clone, Copy, Debug)]
enum Late {
    /// The only one of a turn that fits.
    Whole,
    /// One with a part of a large turn.
    Part(u64),
    /// The commit of a large turn.
    Commit,
}

async fn a_late_batch_changes_nothing(late: Late, end: End, new_owner: NewOwner) {
    // On a busy machine the short lock may expire before its owner sends the batch.
    while !a_batch_comes_late(late, end, new_owner).await {}
}

/// Plays it; `false` where the lock expired too early.
async fn a_batch_comes_late(late: Late, end: End, new_owner: NewOwner) -> bool {
    println!("{late:?}, {end:?}, {new_owner:?}");
    let takeover = Takeover::prepare(end).await;
    let Takeover { site, a, token, .. } = &takeover;
    let gate = Gate::new();
    let held = site.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch);
    let (held, activities) = match late {
        Late::Whole => (held, 10),
        Late::Part(part) => (held.skip(part), 1_000),
        Late::Commit => (held.matching(|request| commits_parts(request.json())), 1_000),
    };
    site.account.wire().add(held);
    let (owner, stale) = (a.clone(), token.clone());
    let mut ack = tokio::spawn(async move { Delta::start(INSTANCE, activities).ack(&owner, &stale).await });
    tokio::select! {
        biased;
        () = within("the late batch", gate.reached()) => {}
        outcome = &mut ack => {
            let error = outcome.expect("no panic").expect_err("an ack that never sent its batch");
            assert!(matches!(end, End::Expires), "{error:?}");
            return false;
        }
    }

    let new_token = takeover.happens(new_owner).await;
    let before = site.documents(INSTANCE).await;
    let answered = site.account.stats_of("a").of(RequestKind::Batch).response_bytes;
    gate.open();
    let outcome = within("the stale ack", ack).await.expect("no panic");
    until("the late batch's answer", || site.account.stats_of("a").of(RequestKind::Batch).response_bytes > answered)
        .await;

    let error = outcome.expect_err("a stale ack");
    match end {
        End::ExpiresForOthers => assert!(!error.is_retryable(), "{error:?}"),
        End::Expires => {}
    }
    assert_eq!(site.documents(INSTANCE).await, before);
    assert_refused(Delta::start(INSTANCE, activities).ack(a, token).await);
    assert_refused(Delta::failure(INSTANCE, 1).ack(a, token).await);
    assert_eq!(site.documents(INSTANCE).await, before);
    takeover.is_the_new_owners(&new_token, new_owner).await;
    true
}

/// Whether a batch commits a turn whose parts are staged.
fn commits_parts(body: Option<Value>) -> bool {
    body.is_some_and(|body| body[0]["resourceBody"]["rollForward"].is_object())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_owners_batch_that_arrives_after_the_takeover_changes_nothing() {
    for end in [End::Expires, End::ExpiresForOthers] {
        for new_owner in [NewOwner::HasClaimed, NewOwner::HasCommitted] {
            a_late_batch_changes_nothing(Late::Whole, end, new_owner).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_owners_staged_part_that_arrives_after_the_takeover_changes_nothing() {
    for part in [0, 5] {
        for new_owner in [NewOwner::HasClaimed, NewOwner::HasCommitted] {
            a_late_batch_changes_nothing(Late::Part(part), End::ExpiresForOthers, new_owner).await;
        }
    }
    a_late_batch_changes_nothing(Late::Part(3), End::Expires, NewOwner::HasCommitted).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_owners_staged_turn_is_not_committed_after_the_takeover() {
    for end in [End::Expires, End::ExpiresForOthers] {
        for new_owner in [NewOwner::HasClaimed, NewOwner::HasCommitted] {
            a_late_batch_changes_nothing(Late::Commit, end, new_owner).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_after_the_takeover_is_refused_and_changes_nothing() {
    for end in [End::Expires, End::ExpiresForOthers] {
        for new_owner in [NewOwner::HasClaimed, NewOwner::HasCommitted] {
            let takeover = Takeover::prepare(end).await;
            let new_token = takeover.happens(new_owner).await;
            let before = takeover.site.documents(INSTANCE).await;
            assert_refused(takeover.a.renew_orchestration_item_lock(&takeover.token, LONG).await);
            assert_eq!(takeover.site.documents(INSTANCE).await, before);
            takeover.is_the_new_owners(&new_token, new_owner).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandon_after_the_takeover_is_refused_and_changes_nothing() {
    for end in [End::Expires, End::ExpiresForOthers] {
        for new_owner in [NewOwner::HasClaimed, NewOwner::HasCommitted] {
            for (delay, ignore_attempt) in [(None, false), (None, true), (Some(LONG), false), (Some(LONG), true)] {
                println!("{end:?}, {new_owner:?}, delay {delay:?}, ignore the attempt: {ignore_attempt}");
                let takeover = Takeover::prepare(end).await;
                let new_token = takeover.happens(new_owner).await;
                let before = takeover.site.documents(INSTANCE).await;
                let token = &takeover.token;
                assert_refused(takeover.a.abandon_orchestration_item(token, delay, ignore_attempt).await);
                assert_eq!(takeover.site.documents(INSTANCE).await, before);
                takeover.is_the_new_owners(&new_token, new_owner).await;
            }
        }
    }
}

/// Waits until a lock that was just taken has expired.
async fn expiry(lock: Duration) {
    tokio::time::sleep(lock + Duration::from_millis(20)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_token_is_refused_by_ack_and_renew_but_not_by_abandon_though_nobody_took_over() {
    for delay in [None, Some(Duration::from_millis(1))] {
        let site = Site::new().await;
        let a = site.provider("a").await;
        begun(&a, INSTANCE, 0).await;
        a.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
        let lock = Duration::from_millis(300);
        let (_, token) = fetch(&a, lock).await;
        expiry(lock).await;
        let before = site.documents(INSTANCE).await;
        assert_refused(Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await);
        assert_refused(a.renew_orchestration_item_lock(&token, LONG).await);
        assert_refused(Delta::failure(INSTANCE, 2).ack(&a, &token).await);
        assert_eq!(site.documents(INSTANCE).await, before);
        a.abandon_orchestration_item(&token, delay, false).await.expect("an expired token can be given back");

        let (item, token) = fetch(&site.provider("b").await, LONG).await;
        assert_eq!(item.messages, [raised(INSTANCE, "paid")]);
        assert_refused(Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_activity_is_refused_by_ack_and_renew_and_runs_again() {
    let site = Site::new().await;
    let a = site.provider("a").await;
    begun(&a, INSTANCE, 1).await;
    let lock = Duration::from_millis(300);
    let (_, token) = fetch_work(&a, lock).await;
    expiry(lock).await;
    let before = site.documents(INSTANCE).await;
    assert_refused(a.renew_work_item_lock(&token, LONG).await);
    assert_refused(a.ack_work_item(&token, Some(completion(INSTANCE, 2, "late"))).await);
    assert_refused(a.ack_work_item(&token, None).await);
    assert_eq!(site.documents(INSTANCE).await, before);
    let (item, _) = fetch_work(&site.provider("b").await, LONG).await;
    assert_eq!(activity_id(&item), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_identical_acks_exactly_one_succeeds() {
    for activities in [3, 300] {
        for at_once in [false, true] {
            let site = Site::new().await;
            let a = site.provider("a").await;
            a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
            let (_, token) = fetch(&a, LONG).await;
            let delta = Delta::start(INSTANCE, activities);
            let (first, second) = if at_once {
                tokio::join!(delta.ack(&a, &token), delta.ack(&a, &token))
            } else {
                (delta.ack(&a, &token).await, delta.ack(&a, &token).await)
            };
            first.expect("the first");
            assert_refused(second);
            assert_eq!(site.provider("b").await.read(INSTANCE).await.expect("a history"), delta.events);
            assert_eq!(site.documents_of(INSTANCE, "activity").await.len() as u64, activities);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_over_the_limit_is_named_and_the_failure_ack_goes_through() {
    let site = Site::new().await;
    let a = site.provider("a").await;
    begun(&a, INSTANCE, 0).await;
    a.enqueue_for_orchestrator(raised(INSTANCE, "photo"), None).await.expect("a message");
    let (_, token) = fetch(&a, LONG).await;
    let before = site.documents(INSTANCE).await;
    let mut delta = Delta::event(INSTANCE, 2, &"x".repeat(2_200_000));
    delta.events.push(external(INSTANCE, 3, "small"));
    let error = delta.ack(&a, &token).await.expect_err("no document holds that event");
    assert!(!error.is_retryable(), "{error:?}");
    let size: Vec<u64> = error.message.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect();
    assert!(error.message.contains("event 2") && error.message.contains(INSTANCE), "{error:?}");
    assert!(size.iter().any(|n| (2_200_000..2_300_000).contains(n)), "no size in {error:?}");
    assert!(size.iter().any(|n| (1_900_000..=2_097_152).contains(n)), "no limit in {error:?}");
    assert_eq!(site.documents(INSTANCE).await, before);

    Delta::failure(INSTANCE, 2).ack(&a, &token).await.expect("the failure can be recorded");
    assert_eq!(site.instance(INSTANCE).await["status"], "Failed");
    assert!(site.documents_of(INSTANCE, "message").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_the_service_has_refused_a_turn_the_failure_ack_goes_through() {
    for status in [400, 413] {
        let site = Site::new().await;
        let a = site.provider("a").await;
        begun(&a, INSTANCE, 0).await;
        a.enqueue_for_orchestrator(raised(INSTANCE, "photo"), None).await.expect("a message");
        let (_, token) = fetch(&a, LONG).await;
        let before = site.documents(INSTANCE).await;
        let refuse = WireAction::Refuse { status, substatus: None, retry_after: None };
        site.account.wire().add(site.rule("a", refuse).on(RequestKind::Batch).times(1));
        let error = Delta::event(INSTANCE, 2, "photo").ack(&a, &token).await.expect_err("a refusal");
        assert!(!error.is_retryable(), "{error:?}");
        assert_eq!(site.documents(INSTANCE).await, before);
        Delta::failure(INSTANCE, 2).ack(&a, &token).await.expect("the failure can be recorded");
        assert_eq!(site.instance(INSTANCE).await["status"], "Failed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_failure_ack_after_a_refused_large_turn_applies_nothing_of_that_turn() {
    let site = Site::new().await;
    let a = site.provider("a").await;
    begun(&a, INSTANCE, 0).await;
    // So many messages that consuming them does not fit one batch.
    for n in 0..150 {
        a.enqueue_for_orchestrator(raised(INSTANCE, &format!("event {n}")), None).await.expect("a message");
    }
    let (item, token) = fetch(&a, LONG).await;
    assert_eq!(item.messages.len(), 150);
    let refuse = WireAction::Refuse { status: 413, substatus: None, retry_after: None };
    site.account.wire().add(site.rule("a", refuse).on(RequestKind::Batch).skip(6).times(1));
    let mut delta = Delta::start(INSTANCE, 1_000);
    delta.events.remove(0);
    let error = delta.ack(&a, &token).await.expect_err("a part was refused");
    assert!(!error.is_retryable(), "{error:?}");

    Delta::failure(INSTANCE, 2).ack(&a, &token).await.expect("the failure can be recorded");
    let history = site.provider("b").await.read(INSTANCE).await.expect("a history");
    assert_eq!(turns::ids(&history), [1, 2]);
    assert!(site.documents_of(INSTANCE, "activity").await.is_empty(), "activities of the turn that was refused");
    assert!(site.documents_of(INSTANCE, "message").await.is_empty());
}

/// An instance with activities, one of which a worker has taken, and a turn that will cancel them all.
async fn about_to_cancel(
    activities: u64,
) -> (Site, CosmosDBProvider, CosmosDBProvider, Delta, String, WorkItem, String) {
    let site = Site::new().await;
    let (a, worker) = (site.provider("a").await, site.provider("worker").await);
    begun(&a, INSTANCE, activities).await;
    a.enqueue_for_orchestrator(raised(INSTANCE, "stop"), None).await.expect("a message");
    let (_, token) = fetch(&a, LONG).await;
    let (item, work) = fetch_work(&worker, LONG).await;
    let mut delta = Delta::event(INSTANCE, activities + 2, "stop");
    delta.cancelled = (2..activities + 2).map(|id| cancelled(INSTANCE, id)).collect();
    (site, a, worker, delta, token, item, work)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_activity_that_a_worker_has_taken_is_gone_and_the_worker_is_told() {
    for activities in [5, 150] {
        let (site, a, worker, delta, token, item, work) = about_to_cancel(activities).await;
        delta.ack(&a, &token).await.expect("the turn commits");
        assert!(site.documents_of(INSTANCE, "activity").await.is_empty());
        assert_refused(worker.renew_work_item_lock(&work, LONG).await);
        assert_refused(worker.ack_work_item(&work, Some(completion(INSTANCE, activity_id(&item), "late"))).await);
        assert!(site.documents_of(INSTANCE, "message").await.is_empty());
        assert_eq!(site.provider("b").await.read(INSTANCE).await.expect("a history").len() as u64, activities + 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_a_worker_finished_in_the_meantime_does_not_keep_the_turn_from_cancelling_the_others() {
    for activities in [5, 150] {
        let (site, a, worker, delta, token, item, work) = about_to_cancel(activities).await;
        let done = completion(INSTANCE, activity_id(&item), "done");
        worker.ack_work_item(&work, Some(done.clone())).await.expect("it was not cancelled yet");
        delta.ack(&a, &token).await.expect("the turn commits");
        assert!(site.documents_of(INSTANCE, "activity").await.is_empty());
        let (item, _) = fetch(&site.provider("b").await, LONG).await;
        assert_eq!(item.messages, [done]);
        assert_eq!(item.history.len() as u64, activities + 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_a_worker_finishes_while_the_commit_is_on_its_way_does_not_undo_it() {
    let (site, a, worker, delta, token, item, work) = about_to_cancel(5).await;
    let gate = Gate::new();
    let held = site.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch);
    site.account.wire().add(held.times(1));
    let ack = tokio::spawn(async move { delta.ack(&a, &token).await });
    within("the commit", gate.reached()).await;
    let done = completion(INSTANCE, activity_id(&item), "done");
    worker.ack_work_item(&work, Some(done.clone())).await.expect("it was not cancelled yet");
    gate.open();
    within("the commit", ack).await.expect("no panic").expect("the turn commits");
    assert!(site.documents_of(INSTANCE, "activity").await.is_empty());
    let (item, _) = fetch(&site.provider("b").await, LONG).await;
    assert_eq!((item.messages, item.history.len()), (vec![done], 7));
}
