use super::{activity::ActivityFilter, turn::TurnFilter, *};
use duroxide::providers::TagFilter;

fn terms(tags: &[&str]) -> FetchTerms<ActivityFilter> {
    let tags = tags.iter().map(|tag| (*tag).to_owned()).collect();
    FetchTerms { lock_timeout: Duration::from_secs(1), patient: true, filter: ActivityFilter(TagFilter::Tags(tags)) }
}

fn tag(tag: &str) -> Option<String> {
    Some(tag.to_owned())
}

#[test]
fn a_claim_reserves_a_sleeping_fetch_that_accepts_the_item_and_only_once() {
    let waiting_fetches: WaitingFetches<ActivityFilter, u32> = WaitingFetches::default();
    let nothing_older = |_: &FetchTerms<ActivityFilter>| false;
    let gpu = waiting_fetches.register(terms(&["gpu"]));
    assert!(waiting_fetches.reserve(&tag("gpu"), nothing_older).is_none(), "it does not sleep");
    let idle = gpu.mark_idle();
    assert!(waiting_fetches.reserve(&tag("cpu"), nothing_older).is_none());
    assert!(waiting_fetches.reserve(&tag("gpu"), |_| true).is_none(), "something older waits for it");
    let reserved = waiting_fetches.reserve(&tag("gpu"), nothing_older).expect("it waits");
    assert!(waiting_fetches.reserve(&tag("gpu"), nothing_older).is_none(), "it is reserved");
    drop(reserved);
    assert!(waiting_fetches.reserve(&tag("gpu"), nothing_older).is_some(), "it was not needed");
    drop(idle);
    assert!(waiting_fetches.reserve(&tag("gpu"), nothing_older).is_none());
}

#[test]
fn a_fetch_that_has_left_is_not_reserved_and_its_reservation_ends() {
    let waiting_fetches: WaitingFetches<TurnFilter, u32> = WaitingFetches::default();
    let waiting_fetch = waiting_fetches.register(FetchTerms {
        lock_timeout: Duration::from_secs(1),
        patient: true,
        filter: TurnFilter(None),
    });
    let idle = waiting_fetch.mark_idle();
    let reserved = waiting_fetches.reserve(&None, |_| false).expect("it waits");
    drop(idle);
    drop(waiting_fetch);
    assert!(waiting_fetches.reserve(&None, |_| false).is_none());
    drop(reserved);
    assert!(waiting_fetches.lock().waiting.is_empty());
}
