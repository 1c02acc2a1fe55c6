//! Checks of the texts of all queries.

use super::*;
use duroxide_cosmos_emulator::sql;
use serde_json::Value;

#[test]
fn every_query_is_in_the_list() {
    let source = include_str!("texts.rs");
    let declared = source.lines().filter(|line| line.starts_with("pub(crate) const ") && line.contains(": QueryText"));
    assert_eq!(declared.count(), ALL.len());
}

#[test]
fn a_query_with_top_has_a_page_size_unless_it_asks_one_partition() {
    const ONE_PARTITION: [&str; 3] = ["visible_messages", "queued_starts", "any_history"];
    for query in ALL.iter().filter(|query| query.text.contains(" TOP ")) {
        assert!(query.page.is_some() || ONE_PARTITION.contains(&query.name), "{}", query.name);
    }
}

#[test]
fn every_text_is_in_the_published_grammar() {
    let wrong: Vec<String> = ALL
        .iter()
        .flat_map(|query| [(query.name, query.text.to_owned()), (query.name, query.sample().text.into_owned())])
        .filter_map(|(name, text)| Some(format!("{name}: {}", sql::parse(&text).err()?)))
        .collect();
    assert!(wrong.is_empty(), "the service would refuse:\n{}", wrong.join("\n"));
}

#[test]
fn no_list_is_compared_by_array_contains_which_uses_no_index() {
    for query in ALL {
        let parsed = sql::parse(query.text).expect("in the grammar");
        assert!(!parsed.calls().iter().any(|call| call.is("ARRAY_CONTAINS")), "{}", query.name);
    }
}

#[test]
fn a_sample_binds_every_parameter() {
    for query in ALL {
        let statement = query.sample();
        let used = sql::parse(&statement.text).expect("in the grammar").parameters().to_vec();
        let bound: Vec<&String> = statement.parameters.iter().map(|(name, _)| name).collect();
        assert!(used.iter().all(|name| bound.contains(&name)) && bound.len() == used.len(), "{}", query.name);
    }
}

#[test]
fn each_value_of_a_list_gets_a_parameter_of_its_own() {
    let statement = CHILDREN.statement().bind_list("@parents", ["a", "b"]);
    assert!(statement.text.ends_with("c.parent IN (@parents0, @parents1)"), "{}", statement.text);
    assert_eq!(statement.parameters[1], ("@parents1".to_owned(), Value::from("b")));
}

#[test]
fn an_empty_list_matches_nothing() {
    let statement = CHILDREN.statement().bind_list("@parents", Vec::<String>::new());
    assert!(statement.text.ends_with("c.parent IN (null)"), "{}", statement.text);
    assert!(statement.parameters.is_empty());
}
