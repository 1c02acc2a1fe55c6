//! A bulk deletion deletes the instances that its filter selects, and continues past those that it cannot delete.

use super::*;
use crate::fixture::*;
use duroxide::providers::{DeleteInstanceResult, InstanceFilter, Provider, ProviderError, WorkItem};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_spares_a_root_between_two_executions() {
    let fixture = Fixture::new(2);
    let provider = fixture.provider("p").await;
    finish(&provider, "ended", None).await;
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let events = vec![started("i", 1), completed("i", 1, 2)];
    commit(&provider, &token, events, Vec::new(), vec![continue_as_new("i")], ended("ContinuedAsNew")).await.unwrap();
    let deleted = admin(&provider).delete_instance_bulk(InstanceFilter::default()).await.unwrap();
    assert_eq!(deleted.instances_deleted, 1);
    assert!(status_of(&provider, "ended").await.is_none());
    let (item, ..) = next_turn(&provider, LONG).await;
    assert!(item.instance == "i" && matches!(item.messages[..], [WorkItem::ContinueAsNew { .. }]), "{item:?}");
}

/// A bulk deletion by "deleter" that has selected `i`, held before the write that prepares it.
async fn bulk_up_to_the_preparation(
    fixture: &Fixture,
    filter: InstanceFilter,
) -> (Gate, tokio::task::JoinHandle<Result<DeleteInstanceResult, ProviderError>>) {
    let deleter = fixture.provider("deleter").await;
    let gate = fixture.hold("deleter", RequestKind::Replace, |request| goes_to(request, "i"));
    let deletion = tokio::spawn(async move { admin(&deleter).delete_instance_bulk(filter).await });
    reached(&gate).await;
    (gate, deletion)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_spares_an_instance_that_was_started_again_under_the_same_id() {
    let named = InstanceFilter { instance_ids: Some(vec!["i".to_owned()]), ..InstanceFilter::default() };
    for filter in [InstanceFilter::default(), named] {
        let fixture = Fixture::new(1);
        let worker = fixture.provider("worker").await;
        finish(&worker, "i", None).await;
        let (gate, deletion) = bulk_up_to_the_preparation(&fixture, filter).await;
        admin(&worker).delete_instance("i", false).await.unwrap();
        begin(&worker, "i", Vec::new(), Vec::new()).await;
        gate.open();
        let deleted = deletion.await.unwrap();
        assert_eq!(deleted.map_or(0, |deleted| deleted.instances_deleted), 0);
        assert_eq!(status_of(&worker, "i").await.as_deref(), Some("Running"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_spares_an_instance_of_the_same_id_that_ended_after_the_filter_selected_it() {
    let fixture = Fixture::new(1);
    let worker = fixture.provider("worker").await;
    finish(&worker, "i", None).await;
    let (gate, deletion) = bulk_up_to_the_preparation(&fixture, InstanceFilter::default()).await;
    admin(&worker).delete_instance("i", false).await.unwrap();
    finish(&worker, "i", None).await;
    gate.open();
    let deleted = deletion.await.unwrap();
    assert_eq!(deleted.map_or(0, |deleted| deleted.instances_deleted), 0);
    assert_eq!(status_of(&worker, "i").await.as_deref(), Some("Completed"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_deletes_running_children_of_a_root_that_has_ended() {
    let fixture = Fixture::new(2);
    let provider = fixture.provider("p").await;
    live_tree(&provider).await;
    let deleted = admin(&provider).delete_instance_bulk(InstanceFilter::default()).await.unwrap();
    assert_eq!(deleted.instances_deleted, 2);
    assert!(fixture.is_erased("parent").await && fixture.is_erased("child").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_spares_an_instance_that_has_the_name_of_a_child() {
    let fixture = Fixture::new(1);
    let (worker, deleter) = (fixture.provider("worker").await, fixture.provider("deleter").await);
    finish(&worker, "r1", None).await;
    finish(&worker, "child", Some("r1")).await;
    finish(&worker, "r2", None).await;
    let hold = |skip: u64, instance: &'static str| {
        let gate = Gate::new();
        let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("deleter").on(RequestKind::Replace);
        fixture.account.wire().add(rule.matching(move |request| goes_to(request, instance)).skip(skip).times(1));
        gate
    };
    // The first attempt prepares the child, meets another `r2`, and aborts. The second attempt comes to the child
    // again.
    let (first_of_r2, second_of_child) = (hold(0, "r2"), hold(2, "child"));
    let bulk = tokio::spawn(async move { admin(&deleter).delete_instance_bulk(InstanceFilter::default()).await });
    reached(&first_of_r2).await;
    admin(&worker).delete_instance("r2", false).await.unwrap();
    finish(&worker, "r2", None).await;
    first_of_r2.open();
    reached(&second_of_child).await;
    admin(&worker).delete_instances_atomic(&["child".to_owned()], true).await.unwrap();
    begin(&worker, "child", Vec::new(), Vec::new()).await;
    second_of_child.open();
    drop(bulk.await.unwrap());
    assert_eq!(status_of(&worker, "child").await.as_deref(), Some("Running"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_continues_past_instances_that_it_cannot_delete() {
    let fixture = Fixture::new(4);
    let a = fixture.provider("a").await;
    many_instances(&fixture, &a, 60).await;
    let refuse = || WireAction::Refuse { status: 403, substatus: None, retry_after: None };
    // One instance cannot be read at all, and another one cannot be written.
    fixture.account.wire().add(WireRule::new(refuse()).matching(|r| goes_to(r, "i7")));
    let write = |kind| WireRule::new(refuse()).on(kind).matching(|r| goes_to(r, "i9"));
    fixture.account.wire().add(write(RequestKind::Replace));
    let deleted = admin(&a).delete_instance_bulk(everything(1_000)).await.unwrap();
    assert_eq!(deleted.instances_deleted, 58);
    fixture.account.wire().clear();
    let mut there = admin(&a).list_instances().await.unwrap();
    there.sort();
    assert_eq!(there, ["i7", "i9"]);
    assert!(fixture.documents().await.iter().all(|d| d.get("deleting").is_none()), "no instance is prepared any more");
    assert_eq!(admin(&a).delete_instance_bulk(everything(1_000)).await.unwrap().instances_deleted, 2);
    assert_nothing_left(&fixture, "at last").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_that_can_delete_nothing_reports_the_reason() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    many_instances(&fixture, &a, 3).await;
    let refuse = WireAction::Refuse { status: 403, substatus: None, retry_after: None };
    fixture.account.wire().add(WireRule::new(refuse).on(RequestKind::Replace));
    let error = admin(&a).delete_instance_bulk(everything(10)).await.unwrap_err();
    assert!(!error.is_retryable(), "{error:?}");
    fixture.account.wire().clear();
    assert_eq!(admin(&a).list_instances().await.unwrap().len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_that_names_instances_reads_only_those() {
    let fixture = Fixture::new(4);
    let a = fixture.provider("a").await;
    many_instances(&fixture, &a, 40).await;
    let named = ["i3", "i4", "nobody", "i4"].map(ToOwned::to_owned).to_vec();
    let filter = InstanceFilter { instance_ids: Some(named), ..InstanceFilter::default() };
    let before = fixture.account.stats_of("a");
    assert_eq!(admin(&a).delete_instance_bulk(filter).await.unwrap().instances_deleted, 2);
    let spent = (fixture.account.stats_of("a") - before).of(RequestKind::Query).response_bytes;
    assert!(spent < 4_000, "{spent} bytes of answers to queries");
    assert_eq!(admin(&a).list_instances().await.unwrap().len(), 38);
}

/// Cuts a bulk deletion after so many requests, and lets another provider repeat it.
async fn cut_bulk(passing: u64) {
    let fixture = Fixture::new(4);
    let b = fixture.provider("b").await;
    many_instances(&fixture, &b, 150).await;
    make_tree(&fixture, &b, "root", 5, 10).await;
    let a = fixture.provider("a").await;
    let cut = fixture.cut_at("a", passing, passing.is_multiple_of(2));
    let ended = until_cut(admin(&a).delete_instance_bulk(everything(1_000)), &cut).await;
    assert!(matches!(ended, Ended::Cut), "the bulk deletion took no more than {passing} requests");
    drop(a);
    // The second call finishes the committed deletions of the first, and deletes the rest.
    admin(&b).delete_instance_bulk(everything(1_000)).await.unwrap();
    assert_nothing_left(&fixture, &format!("cut after {passing}")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_that_was_cut_is_finished_by_the_next_call() {
    let cuts = [5, 20, 150, 326, 332, 345, 400, 500, 701];
    all_at_once(cuts.into_iter().map(cut_bulk)).await;
}
