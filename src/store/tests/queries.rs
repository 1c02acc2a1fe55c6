//! Queries: everything that matches, once, from as many pages and partitions as it takes.

use super::scene::{both_ways, in_time, note, Note, Scene};
use crate::store::queries::QueryText;
use azure_core::http::StatusCode;
use azure_data_cosmos::fault_injection::{
    CustomResponseBuilder, FaultInjectionConditionBuilder, FaultInjectionErrorType, FaultInjectionResult,
    FaultInjectionResultBuilder, FaultInjectionRule, FaultInjectionRuleBuilder, FaultOperationType,
};
use duroxide_cosmos_emulator::RequestKind;
use serde_json::json;
use std::{collections::BTreeSet, sync::Arc};

both_ways!(
    a_query_in_a_partition_sees_that_partition_only,
    a_query_across_partitions_asks_all_of_them,
    an_order_by_across_partitions_is_merged,
    a_query_that_matches_nothing_is_empty,
    parameters_are_bound_and_never_spliced_in,
);

const NOTES: QueryText = QueryText { name: "notes", text: "SELECT * FROM c WHERE c.type = 'note'" };
const BY_TEXT: QueryText =
    QueryText { name: "by_text", text: "SELECT * FROM c WHERE ARRAY_CONTAINS(@texts, c.text) ORDER BY c.text" };

/// Twenty notes in twenty partitions, and what their texts are.
async fn twenty(scene: &Scene) -> BTreeSet<String> {
    let texts = (0..20).map(|n| format!("{n:02}"));
    let notes: Vec<Note> = texts.map(|text| note(&format!("instance {text}"), "n", text)).collect();
    for note in &notes {
        scene.given(note).await;
    }
    notes.into_iter().map(|note| note.text).collect()
}

fn texts(notes: Vec<Note>) -> Vec<String> {
    notes.into_iter().map(|note| note.text).collect()
}

async fn a_query_in_a_partition_sees_that_partition_only(scene: Scene) {
    let (here, there) = (note("i", "a", "here"), note("j", "a", "there"));
    scene.given(&here).await;
    scene.given(&there).await;
    let found: Vec<Note> = scene.store.query_partition(&here.instance_id, NOTES.statement(), in_time()).await.unwrap();
    assert_eq!(found, [here]);
    assert_eq!(scene.account.stats().of(RequestKind::Query).requests, 1);
}

async fn a_query_across_partitions_asks_all_of_them(scene: Scene) {
    let wanted = twenty(&scene).await;
    let found: Vec<Note> = scene.store.query_container(NOTES.statement(), in_time()).await.unwrap();
    let found = texts(found);
    assert_eq!(found.len(), wanted.len());
    assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), wanted);
    assert_eq!(scene.account.stats().of(RequestKind::Query).requests, 4);
}

async fn an_order_by_across_partitions_is_merged(scene: Scene) {
    let wanted: Vec<String> = twenty(&scene).await.into_iter().collect();
    let statement = BY_TEXT.statement().bind("@texts", &wanted);
    let found: Vec<Note> = scene.store.query_container(statement, in_time()).await.unwrap();
    assert_eq!(texts(found), wanted);
}

async fn a_query_that_matches_nothing_is_empty(scene: Scene) {
    let elsewhere = note("i", "a", "").instance_id;
    let in_partition: Vec<Note> = scene.store.query_partition(&elsewhere, NOTES.statement(), in_time()).await.unwrap();
    let anywhere: Vec<Note> = scene.store.query_container(NOTES.statement(), in_time()).await.unwrap();
    assert!(in_partition.is_empty() && anywhere.is_empty());
}

async fn parameters_are_bound_and_never_spliced_in(scene: Scene) {
    let awkward = "' OR true OR c.text = '\"\\";
    scene.given(&note("i", "a", awkward)).await;
    scene.given(&note("i", "b", "other")).await;
    let statement = BY_TEXT.statement().bind("@texts", [awkward]);
    let found: Vec<Note> = scene.store.query_container(statement, in_time()).await.unwrap();
    assert_eq!(texts(found), [awkward]);
}

fn on_queries(id: &str, times: u32, result: FaultInjectionResult) -> Arc<FaultInjectionRule> {
    let condition = FaultInjectionConditionBuilder::new().with_operation_type(FaultOperationType::QueryItem).build();
    let rule = FaultInjectionRuleBuilder::new(id, result).with_condition(condition).with_hit_limit(times);
    Arc::new(rule.build())
}

/// A page of a query's answer, with or without another one behind it.
fn page(id: &str, notes: &[Note], more: bool) -> Arc<FaultInjectionRule> {
    let body = json!({ "_rid": "rid", "Documents": notes, "_count": notes.len() });
    let mut response = CustomResponseBuilder::new(StatusCode::Ok)
        .with_header("x-ms-request-charge", "1.5")
        .with_body(body.to_string());
    if more {
        response = response.with_header("x-ms-continuation", "more");
    }
    on_queries(id, 1, FaultInjectionResultBuilder::new().with_custom_response(response.build()).build())
}

#[tokio::test]
async fn a_query_of_several_pages_returns_all_of_them() {
    let notes = ["1", "2", "3", "4"].map(|name| note("i", name, name));
    let rules = vec![page("1", &notes[..2], true), page("2", &[], true), page("3", &notes[2..], false)];
    let scene = Scene::with_rules(rules.clone()).await;
    let partition = &notes[0].instance_id;
    let found: Vec<Note> = scene.store.query_partition(partition, NOTES.statement(), in_time()).await.unwrap();
    assert_eq!(found, notes);
    assert!(rules.iter().all(|rule| rule.hit_count() == 1));
}

#[tokio::test]
async fn a_page_that_fails_loses_and_repeats_nothing() {
    let notes = ["1", "2", "3"].map(|name| note("i", name, name));
    let throttled = FaultInjectionResultBuilder::new().with_error(FaultInjectionErrorType::TooManyRequests).build();
    let rules = vec![page("1", &notes[..2], true), on_queries("2", 1, throttled)];
    let scene = Scene::with_rules(rules.clone()).await;
    for note in &notes {
        scene.given(note).await;
    }
    let partition = &notes[0].instance_id;
    let mut found: Vec<Note> = scene.store.query_partition(partition, NOTES.statement(), in_time()).await.unwrap();
    found.sort_by(|a, b| a.text.cmp(&b.text));
    assert_eq!(found, notes);
    assert!(rules.iter().all(|rule| rule.hit_count() == 1));
}
