//! A write whose answer is lost is read, not guessed: each call reports what happened, and nothing is done twice.

#[path = "common/turns.rs"]
mod turns;

use duroxide::providers::{Provider, ProviderError};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRuleHandle};
use std::{sync::Arc, time::Duration};
use turns::{
    activity, activity_id, assert_refused, begun, completion, fetch, fetch_now, fetch_work, fetch_work_now, raised,
    start, until, within, Delta, Site, LONG, SHORT,
};

const INSTANCE: &str = "order";
/// So many answers in a row are lost. The SDK sends a write again by itself, so that one call loses them all.
const TIMES: [u64; 2] = [1, 5];

impl Site {
    /// Loses the next answers to "a" of this kind.
    fn lose(&self, kind: RequestKind, times: u64) -> WireRuleHandle {
        self.account.wire().add(self.rule("a", WireAction::LoseAnswer).on(kind).times(times))
    }
}

/// An account with a provider "a" that loses answers and a provider "b" that doesn't.
async fn site() -> (Site, CosmosDBProvider, CosmosDBProvider) {
    let site = Site::new().await;
    let (a, b) = (site.provider("a").await, site.provider("b").await);
    (site, a, b)
}

/// An instance of which "a" has fetched the second turn.
async fn second_turn(lock: Duration) -> (Site, CosmosDBProvider, CosmosDBProvider, String) {
    let (site, a, b) = site().await;
    begun(&a, INSTANCE, 0).await;
    a.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
    let (_, token) = fetch(&a, lock).await;
    (site, a, b, token)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answers_are_lost_is_reported_as_done_and_done_once() {
    for (times, activities) in [(1, 3), (5, 3), (1, 300), (5, 300)] {
        let (site, a, b) = site().await;
        a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
        let (_, token) = fetch(&a, LONG).await;
        let lost = site.lose(RequestKind::Batch, times);
        let delta = Delta::start(INSTANCE, activities);
        delta.ack(&a, &token).await.expect("the commit happened");
        assert_eq!(lost.hits(), times);
        assert_refused(delta.ack(&a, &token).await);
        assert_eq!(b.read(INSTANCE).await.expect("a history"), delta.events);
        assert_eq!(site.documents_of(INSTANCE, "activity").await.len() as u64, activities);
        assert!(site.instance(INSTANCE).await["lock"].is_null());
        assert!(fetch_now(&b, LONG).await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_is_done_even_if_others_have_committed_since() {
    let (site, a, b, token) = second_turn(LONG).await;
    site.lose(RequestKind::Batch, 1);
    let gate = Gate::new();
    let again = site.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch);
    site.account.wire().add(again);
    let ack = tokio::spawn(async move { Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await });
    within("the repetition", gate.reached()).await;
    // The first turn is there; others go on with the instance.
    b.enqueue_for_orchestrator(raised(INSTANCE, "shipped"), None).await.expect("a message");
    let (item, next) = fetch(&b, LONG).await;
    assert_eq!(item.messages, [raised(INSTANCE, "shipped")]);
    Delta::event(INSTANCE, 3, "shipped").ack(&b, &next).await.expect("the turn after it");
    gate.open();
    within("the ack", ack).await.expect("no panic").expect("the commit happened");
    assert_eq!(turns::ids(&b.read(INSTANCE).await.expect("a history")), [1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_does_not_take_the_next_owners_lock_away() {
    let (site, a, b, token) = second_turn(LONG).await;
    site.lose(RequestKind::Batch, 1);
    let gate = Gate::new();
    let again = site.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch);
    site.account.wire().add(again);
    let a = Arc::new(a);
    let owner = a.clone();
    let ack = tokio::spawn(async move { Delta::event(INSTANCE, 2, "paid").ack(&owner, &token).await });
    within("the repetition", gate.reached()).await;
    b.enqueue_for_orchestrator(raised(INSTANCE, "shipped"), None).await.expect("a message");
    let (_, next) = fetch(&b, LONG).await;
    gate.open();
    within("the ack", ack).await.expect("no panic").expect("the commit happened");

    let before = site.instance(INSTANCE).await;
    a.enqueue_for_orchestrator(raised(INSTANCE, "returned"), None).await.expect("a message");
    assert!(fetch_now(&a, LONG).await.is_none(), "two owners");
    assert_eq!(site.instance(INSTANCE).await, before);
    Delta::event(INSTANCE, 3, "shipped").ack(&b, &next).await.expect("the lock is the next owner's");
    assert_eq!(turns::ids(&a.read(INSTANCE).await.expect("a history")), [1, 2, 3]);
}

/// Cuts "a" off entirely, until its locks have expired.
async fn outage<T>(site: &Site, call: impl std::future::Future<Output = Result<T, ProviderError>>) -> ProviderError {
    let outage = site.account.wire().add(site.rule("a", WireAction::FailConnection));
    let error = within("the call to give up", call).await.err().expect("nothing gets through");
    outage.remove();
    error
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ack_that_gave_up_in_an_outage_refuses_its_token_from_then_on_and_the_turn_runs_again() {
    for activities in [0, 300] {
        let (site, a, b, token) = second_turn(SHORT).await;
        let mut delta = Delta::start(INSTANCE, activities);
        delta.events[0] = turns::external(INSTANCE, 1_000, "paid");
        let error = outage(&site, delta.ack(&a, &token)).await;
        assert!(error.is_retryable(), "{error:?}");
        let before = site.documents(INSTANCE).await;
        assert_refused(delta.ack(&a, &token).await);
        assert_refused(Delta::failure(INSTANCE, 2).ack(&a, &token).await);
        assert_refused(a.renew_orchestration_item_lock(&token, LONG).await);
        assert_eq!(site.documents(INSTANCE).await, before);

        let (item, token) = fetch(&b, LONG).await;
        assert_eq!((item.messages.as_slice(), item.history.len()), ([raised(INSTANCE, "paid")].as_slice(), 1));
        delta.ack(&b, &token).await.expect("the turn runs again");
        assert_eq!(b.read(INSTANCE).await.expect("a history").len() as u64, 2 + activities);
        assert_eq!(site.documents_of(INSTANCE, "activity").await.len() as u64, activities);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ack_that_gave_up_although_it_happened_says_so_when_it_is_repeated() {
    let (site, a, b, token) = second_turn(SHORT).await;
    // The commit is carried out, and then nothing is heard any more.
    let lost = site.lose(RequestKind::Batch, 1);
    let error = outage(&site, Delta::event(INSTANCE, 2, "paid").ack(&a, &token)).await;
    assert!(error.is_retryable(), "{error:?}");
    assert_eq!(lost.hits(), 1);
    Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await.expect("it happened");
    assert_refused(Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await);
    assert_eq!(turns::ids(&b.read(INSTANCE).await.expect("a history")), [1, 2]);
    assert!(fetch_now(&b, LONG).await.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_a_new_instance_whose_answer_is_lost_is_a_claim() {
    for times in TIMES {
        let (site, a, b) = site().await;
        a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
        let lost = site.lose(RequestKind::Create, times);
        let (item, token) = fetch(&a, LONG).await;
        assert_eq!((lost.hits(), item.messages), (times, vec![start(INSTANCE)]));
        assert!(fetch_now(&b, LONG).await.is_none(), "two owners");
        Delta::start(INSTANCE, 0).ack(&a, &token).await.expect("the turn commits");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_answer_is_lost_is_a_claim_and_counted_once() {
    for times in TIMES {
        let (site, a, b) = site().await;
        begun(&a, INSTANCE, 0).await;
        a.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
        let lost = site.lose(RequestKind::Replace, times);
        let fetched = a.fetch_orchestration_item(LONG, turns::PATIENCE, None).await.expect("a fetch");
        let (item, token, attempts) = fetched.expect("a turn");
        assert_eq!((lost.hits(), item.messages, attempts), (times, vec![raised(INSTANCE, "paid")], 1));
        assert!(fetch_now(&b, LONG).await.is_none(), "two owners");
        Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await.expect("the turn commits");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_caller_has_gone_away_is_given_back_uncounted() {
    let (site, a, b) = site().await;
    begun(&a, INSTANCE, 0).await;
    a.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
    let gate = Gate::new();
    let held = site.rule("a", WireAction::HoldAfter(gate.clone())).on(RequestKind::Replace).times(1);
    site.account.wire().add(held);
    let a = Arc::new(a);
    let caller = a.clone();
    let fetching = tokio::spawn(async move { fetch(&caller, LONG).await });
    within("the claim", gate.reached()).await;
    fetching.abort();
    gate.open();
    let fetched = b.fetch_orchestration_item(LONG, turns::PATIENCE, None).await.expect("a fetch");
    let (item, token, attempts) = fetched.expect("a turn that nobody holds");
    assert_eq!((item.messages, attempts), (vec![raised(INSTANCE, "paid")], 1));
    Delta::event(INSTANCE, 2, "paid").ack(&b, &token).await.expect("the turn commits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_whose_answer_is_lost_is_in_the_queue_once() {
    for times in TIMES {
        let (site, a, b) = site().await;
        let lost = site.lose(RequestKind::Create, times);
        a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("it is in the queue");
        assert_eq!(lost.hits(), times);
        assert_eq!(site.documents_of(INSTANCE, "message").await.len(), 1);
        let (item, token) = fetch(&b, LONG).await;
        assert_eq!(item.messages, [start(INSTANCE)]);
        Delta::start(INSTANCE, 0).ack(&b, &token).await.expect("the turn commits");
        assert!(fetch_now(&a, LONG).await.is_none() && fetch_now(&b, LONG).await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_answer_is_lost_is_in_the_queue_once() {
    for times in TIMES {
        let (site, a, b) = site().await;
        let lost = site.lose(RequestKind::Batch, times);
        a.enqueue_for_worker(activity(INSTANCE, 2)).await.expect("it is in the queue");
        assert_eq!(lost.hits(), times);
        assert_eq!(site.documents_of(INSTANCE, "activity").await.len(), 1);
        let (item, token) = fetch_work(&b, LONG).await;
        assert_eq!(item, activity(INSTANCE, 2));
        b.ack_work_item(&token, None).await.expect("it is done");
        assert!(fetch_work_now(&a, LONG).await.is_none() && fetch_work_now(&b, LONG).await.is_none());
    }
}

/// An activity that is in the queue, of an instance that waits for it.
async fn an_activity() -> (Site, CosmosDBProvider, CosmosDBProvider) {
    let (site, a, b) = site().await;
    begun(&a, INSTANCE, 1).await;
    (site, a, b)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_an_activity_whose_answer_is_lost_is_a_claim_and_counted_once() {
    for times in TIMES {
        let (site, a, b) = an_activity().await;
        let lost = site.lose(RequestKind::Replace, times);
        let tags = duroxide::providers::TagFilter::Any;
        let fetched = a.fetch_work_item(LONG, turns::PATIENCE, None, &tags).await.expect("a fetch");
        let (item, token, attempts) = fetched.expect("an activity");
        assert_eq!((lost.hits(), activity_id(&item), attempts), (times, 2, 1));
        assert!(fetch_work_now(&b, LONG).await.is_none(), "two owners");
        a.ack_work_item(&token, Some(completion(INSTANCE, 2, "done"))).await.expect("it is done");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activitys_end_whose_answer_is_lost_is_reported_as_done_and_completes_it_once() {
    for times in TIMES {
        let (site, a, b) = an_activity().await;
        let (_, token) = fetch_work(&a, LONG).await;
        let lost = site.lose(RequestKind::Batch, times);
        a.ack_work_item(&token, Some(completion(INSTANCE, 2, "done"))).await.expect("it is done");
        assert_eq!(lost.hits(), times);
        assert_refused(a.ack_work_item(&token, Some(completion(INSTANCE, 2, "again"))).await);
        let (item, _) = fetch(&b, LONG).await;
        assert_eq!(item.messages, [completion(INSTANCE, 2, "done")]);
        assert!(fetch_work_now(&b, LONG).await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activitys_end_whose_answer_is_lost_is_done_even_if_its_completion_was_consumed_since() {
    let (site, a, b) = an_activity().await;
    let (_, token) = fetch_work(&a, LONG).await;
    site.lose(RequestKind::Batch, 1);
    let gate = Gate::new();
    site.account.wire().add(site.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch));
    let done = completion(INSTANCE, 2, "done");
    let message = done.clone();
    let ack = tokio::spawn(async move { a.ack_work_item(&token, Some(message)).await });
    within("the repetition", gate.reached()).await;
    let (item, turn) = fetch(&b, LONG).await;
    assert_eq!(item.messages, [done]);
    let events = vec![turns::completed(INSTANCE, 3, 2, "done")];
    Delta { events, ..Delta::default() }.ack(&b, &turn).await.expect("the turn commits");
    gate.open();
    within("the ack", ack).await.expect("no panic").expect("it is done");
    assert!(site.documents_of(INSTANCE, "message").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activitys_renewal_whose_answer_is_lost_is_a_renewal() {
    for times in TIMES {
        let (site, a, b) = an_activity().await;
        let (_, token) = fetch_work(&a, Duration::from_secs(20)).await;
        let lost = site.lose(RequestKind::Replace, times);
        a.renew_work_item_lock(&token, LONG).await.expect("the lock is extended");
        assert_eq!(lost.hits(), times);
        assert!(fetch_work_now(&b, LONG).await.is_none(), "two owners");
        a.renew_work_item_lock(&token, LONG).await.expect("the lock is extended again");
        a.ack_work_item(&token, Some(completion(INSTANCE, 2, "done"))).await.expect("it is done");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_renewal_failed_for_good_is_not_removed_by_the_ack_that_follows() {
    let (site, a, b) = an_activity().await;
    let (_, token) = fetch_work(&a, SHORT).await;
    outage(&site, a.renew_work_item_lock(&token, LONG)).await;
    // What the runtime does after a renewal that failed.
    assert_refused(a.ack_work_item(&token, None).await);
    let (item, _) = fetch_work(&b, LONG).await;
    assert_eq!(activity_id(&item), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_given_back_with_its_answer_lost_can_be_taken_at_once() {
    for times in TIMES {
        let (site, a, b) = an_activity().await;
        let (_, token) = fetch_work(&a, LONG).await;
        let lost = site.lose(RequestKind::Replace, times);
        a.abandon_work_item(&token, None, true).await.expect("it is given back");
        assert_eq!(lost.hits(), times);
        let tags = duroxide::providers::TagFilter::Any;
        let fetched = b.fetch_work_item(LONG, turns::PATIENCE, None, &tags).await.expect("a fetch");
        let (_, _, attempts) = fetched.expect("an activity");
        assert_eq!(attempts, 1);
        assert!(fetch_work_now(&a, LONG).await.is_none(), "two owners");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_whose_answer_is_lost_is_a_renewal() {
    for times in TIMES {
        let (site, a, b, token) = second_turn(Duration::from_secs(20)).await;
        let lost = site.lose(RequestKind::Replace, times);
        a.renew_orchestration_item_lock(&token, LONG).await.expect("the lock is extended");
        assert_eq!(lost.hits(), times);
        assert!(fetch_now(&b, LONG).await.is_none(), "two owners");
        a.renew_orchestration_item_lock(&token, LONG).await.expect("the lock is extended again");
        Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await.expect("the turn commits");
        assert_eq!(turns::ids(&b.read(INSTANCE).await.expect("a history")), [1, 2]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_given_back_with_its_answer_lost_can_be_taken_when_it_is_due() {
    let soon = Some(Duration::from_millis(50));
    for (times, delay, kind) in [
        (1, None, RequestKind::Replace),
        (5, None, RequestKind::Replace),
        (1, soon, RequestKind::Batch),
        (5, soon, RequestKind::Batch),
    ] {
        let (site, a, b, token) = second_turn(LONG).await;
        let lost = site.lose(kind, times);
        a.abandon_orchestration_item(&token, delay, true).await.expect("it is given back");
        assert_eq!(lost.hits(), times);
        assert_refused(Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await);
        let fetched = b.fetch_orchestration_item(LONG, turns::PATIENCE, None).await.expect("a fetch");
        let (item, token, attempts) = fetched.expect("a turn that nobody holds");
        assert_eq!((item.messages, attempts), (vec![raised(INSTANCE, "paid")], 1));
        Delta::event(INSTANCE, 2, "paid").ack(&b, &token).await.expect("the turn commits");
        assert!(fetch_now(&a, LONG).await.is_none(), "a message was handled twice");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_nobody_could_hear_of_is_given_back_once_the_outage_is_over() {
    let (site, a, b) = site().await;
    begun(&a, INSTANCE, 0).await;
    b.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
    let gate = Gate::new();
    let claim = site.rule("a", WireAction::HoldAfter(gate.clone())).on(RequestKind::Replace).times(1);
    site.account.wire().add(claim);
    let outage = site.account.wire().add(site.rule("a", WireAction::FailConnection).on(RequestKind::Replace));
    let unread = site.account.wire().add(site.rule("a", WireAction::FailConnection).on(RequestKind::Read));
    let a = Arc::new(a);
    let caller = a.clone();
    let fetching = tokio::spawn(async move { fetch(&caller, LONG).await });
    within("the claim", gate.reached()).await;
    assert!(site.instance(INSTANCE).await["lock"].is_object(), "the claim was carried out");
    until("an attempt that fails", || outage.hits() + unread.hits() > 0).await;
    fetching.abort();
    outage.remove();
    unread.remove();
    gate.open();
    let (item, token) = fetch(&b, LONG).await;
    assert_eq!(item.messages, [raised(INSTANCE, "paid")]);
    Delta::event(INSTANCE, 2, "paid").ack(&b, &token).await.expect("the turn commits");
}
