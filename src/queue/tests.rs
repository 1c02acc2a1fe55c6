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
fn only_who_sleeps_and_takes_it_is_reserved_and_once() {
    let counter: WaitingFetches<ActivityFilter, u32> = WaitingFetches::default();
    let nothing_older = |_: &FetchTerms<ActivityFilter>| false;
    let gpu = counter.register(terms(&["gpu"]));
    assert!(counter.reserve(&tag("gpu"), nothing_older).is_none(), "it is awake");
    let asleep = gpu.mark_idle();
    assert!(counter.reserve(&tag("cpu"), nothing_older).is_none());
    assert!(counter.reserve(&tag("gpu"), |_| true).is_none(), "something older waits for it");
    let reserved = counter.reserve(&tag("gpu"), nothing_older).expect("it waits");
    assert!(counter.reserve(&tag("gpu"), nothing_older).is_none(), "it is reserved");
    drop(reserved);
    assert!(counter.reserve(&tag("gpu"), nothing_older).is_some(), "it was not needed");
    drop(asleep);
    assert!(counter.reserve(&tag("gpu"), nothing_older).is_none());
}

#[test]
fn who_has_left_is_not_reserved_and_does_no_harm_to_what_was() {
    let counter: WaitingFetches<TurnFilter, u32> = WaitingFetches::default();
    let standing =
        counter.register(FetchTerms { lock_timeout: Duration::from_secs(1), patient: true, filter: TurnFilter(None) });
    let asleep = standing.mark_idle();
    let reserved = counter.reserve(&None, |_| false).expect("it waits");
    drop(asleep);
    drop(standing);
    assert!(counter.reserve(&None, |_| false).is_none());
    drop(reserved);
    assert!(counter.lock().waiting.is_empty());
}
