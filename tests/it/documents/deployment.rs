//! `examples/azure` deploys the resources that the code needs: the same partition key, index and time to live, a role
//! of the data plane, and variables that the provider reads.

use azure_data_cosmos::models::PartitionKeyVersion;
use duroxide_cosmos::container_properties;
use serde_json::Value;

const TEMPLATE: &str = include_str!("../../../examples/azure/main.bicep");

const SCRIPT: &str = include_str!("../../../examples/azure/deploy.sh");

const POLICY: &str = include_str!("../../../examples/azure/indexing-policy.json");

const VARIABLES: &str = include_str!("../../../.env.example");

const WORKER: &str = include_str!("../../../examples/worker.rs");

const DATA_CONTRIBUTOR: &str = "00000000-0000-0000-0000-000000000002";

/// The container's properties in the code, as Cosmos DB receives them.
fn properties() -> Value {
    serde_json::to_value(container_properties("duroxide")).unwrap()
}

/// The text between the first `from` and the `to` that follows it.
fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let start = text.find(from).unwrap_or_else(|| panic!("{from:?} is not there")) + from.len();
    let length = text[start..].find(to).unwrap_or_else(|| panic!("no {to:?} after {from:?}"));
    &text[start..start + length]
}

#[track_caller]
fn assert_holds(text: &str, part: &str) {
    assert!(text.contains(part), "{part:?} is not there");
}

#[test]
fn the_index_is_the_one_in_the_code() {
    let deployed: Value = serde_json::from_str(POLICY).unwrap();
    let ours = &properties()["indexingPolicy"];
    let pretty = serde_json::to_string_pretty(ours).unwrap();
    assert_eq!(&deployed, ours, "examples/azure/indexing-policy.json must say:\n{pretty}");
}

#[test]
fn the_template_and_the_script_deploy_that_index() {
    assert_holds(TEMPLATE, "indexingPolicy: loadJsonContent('indexing-policy.json')");
    assert_eq!(SCRIPT.matches(r#"--idx "@$here/indexing-policy.json""#).count(), 2, "when created and when updated");
}

#[test]
fn the_partition_key_is_the_one_in_the_code() {
    let ours = container_properties("duroxide").partition_key;
    assert_eq!(ours.version(), PartitionKeyVersion::V2);
    let paths: Vec<&str> = ours.paths().iter().map(AsRef::as_ref).collect();
    let [path] = paths[..] else { panic!("one path, not {paths:?}") };

    let key = between(TEMPLATE, "partitionKey: {", "}");
    assert_holds(key, "kind: 'Hash'");
    assert_holds(key, &format!("paths: ['{path}']"));
    assert_holds(key, "version: 2");
    assert_holds(SCRIPT, &format!("--partition-key-path {path} --partition-key-version 2"));
}

#[test]
fn time_to_live_is_the_one_in_the_code() {
    let ours = &properties()["defaultTtl"];
    assert_eq!(between(TEMPLATE, "defaultTtl: ", "\n"), ours.to_string());
    assert_eq!(SCRIPT.matches(&format!("--ttl {ours} ")).count(), 2, "when created and when updated");
}

#[test]
fn the_account_takes_entra_id_only_and_writes_in_one_region() {
    assert_holds(TEMPLATE, "disableLocalAuth: true");
    assert_holds(SCRIPT, "--set properties.disableLocalAuth=true");
    assert_holds(TEMPLATE, "enableMultipleWriteLocations: false");
    assert_holds(SCRIPT, "--enable-multiple-write-locations false");
}

#[test]
fn the_identity_gets_the_data_plane_role() {
    assert_eq!(between(TEMPLATE, "var dataContributor = '", "'"), DATA_CONTRIBUTOR);
    assert_holds(TEMPLATE, "roleDefinitionId: '${account.id}/sqlRoleDefinitions/${dataContributor}'");
    assert_eq!(between(SCRIPT, "data_contributor=", "\n"), DATA_CONTRIBUTOR);
    assert_holds(SCRIPT, r#"--role-definition-id "$data_contributor""#);
}

#[test]
fn the_worker_gets_variables_that_it_reads_and_no_secret() {
    let in_template = between(TEMPLATE, "env: [", "]");
    let in_template: Vec<&str> = in_template.split("name: '").skip(1).map(|rest| between(rest, "", "'")).collect();
    let in_script = between(SCRIPT, "--env-vars ", "--output");
    let in_script: Vec<&str> = in_script.split_whitespace().filter_map(|word| Some(word.split_once('=')?.0)).collect();
    assert_eq!(in_template, in_script);
    for variable in in_template {
        let read_by_provider = VARIABLES.lines().any(|line| line.starts_with(&format!("{variable}=")));
        let read_by_worker = WORKER.contains(&format!("env = \"{variable}\""));
        assert!(read_by_provider || read_by_worker, "no code reads {variable}");
        assert!(!["COSMOS_KEY", "COSMOS_CONNECTION_STRING", "AZURE_CLIENT_SECRET"].contains(&variable), "{variable}");
    }
    assert_holds(TEMPLATE, "{ name: 'COSMOS_CREDENTIAL', value: 'managed_identity' }");
    assert_holds(TEMPLATE, "{ name: 'AZURE_CLIENT_ID', value: identity.properties.clientId }");
}

#[test]
fn the_host_waits_longer_than_the_worker_takes_to_stop() {
    let host: u32 = between(TEMPLATE, "terminationGracePeriodSeconds: ", "\n").parse().unwrap();
    let worker: u32 = between(TEMPLATE, "'WORKER_GRACE_SECONDS', value: '", "'").parse().unwrap();
    assert!(host > worker + 5, "{host} s are not enough for {worker} s and what follows");
}
