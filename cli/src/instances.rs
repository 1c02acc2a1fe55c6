//! Reads of instances that several commands share.

use crate::{
    account::Account,
    times::{ago, moment},
    Outcome,
};
use duroxide_cosmos::operate::{InstanceQuery, InstanceSummary};
use duroxide_cosmos_dashboard::instance;

/// Instances of one page.
pub const PAGE: usize = 1_000;

/// An instance with all its descendants.
pub async fn instance_tree(account: &Account, id: &str) -> anyhow::Result<Vec<InstanceSummary>> {
    let tree = instance::instance_tree(&account.provider, &account.client, id, usize::MAX).await;
    tree.map_err(|error| anyhow::anyhow!(error))
}

/// Every instance that the query returns and the test accepts.
pub async fn select_all(
    account: &Account,
    query: &InstanceQuery,
    accepts: impl Fn(&InstanceSummary) -> bool,
) -> anyhow::Result<Vec<InstanceSummary>> {
    let (mut found, mut cursor) = (Vec::new(), None);
    loop {
        let page = account.provider.instances(query, cursor.as_deref(), PAGE).await?;
        found.extend(page.instances.into_iter().filter(&accepts));
        cursor = page.cursor;
        if cursor.is_none() {
            return Ok(found);
        }
    }
}

/// The outcome for an instance that does not exist.
pub fn not_found(id: &str) -> Outcome {
    Outcome::NotFound(format!("there is no instance {id:?}, or no worker has processed its start yet"))
}

/// A time with its age, for a heading.
pub fn time_and_age(millis: u64) -> String {
    format!("{} ({})", moment(millis), ago(millis))
}
