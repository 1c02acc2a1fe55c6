use super::{turn::TurnWants, work::WorkWants, *};
use duroxide::providers::TagFilter;

fn terms(tags: &[&str]) -> Terms<WorkWants> {
    let tags = tags.iter().map(|tag| (*tag).to_owned()).collect();
    Terms { lock_timeout: Duration::from_secs(1), patient: true, wants: WorkWants(TagFilter::Tags(tags)) }
}

fn tag(tag: &str) -> Option<String> {
    Some(tag.to_owned())
}

#[test]
fn only_who_sleeps_and_takes_it_is_reserved_and_once() {
    let counter: Counter<WorkWants, u32> = Counter::default();
    let nothing_older = |_: &Terms<WorkWants>| false;
    let gpu = counter.stand(terms(&["gpu"]));
    assert!(counter.reserve(&tag("gpu"), nothing_older).is_none(), "it is awake");
    let asleep = gpu.sleeps();
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
    let counter: Counter<TurnWants, u32> = Counter::default();
    let standing = counter.stand(Terms { lock_timeout: Duration::from_secs(1), patient: true, wants: TurnWants(None) });
    let asleep = standing.sleeps();
    let reserved = counter.reserve(&None, |_| false).expect("it waits");
    drop(asleep);
    drop(standing);
    assert!(counter.reserve(&None, |_| false).is_none());
    drop(reserved);
    assert!(counter.lock().waiting.is_empty());
}
