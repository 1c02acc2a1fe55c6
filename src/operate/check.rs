//! Checks of an account: the requirements of opening it, and every assumption about Cosmos DB, one line each.

use crate::{
    cosmos::{self, CheckDepth, CheckLine},
    CosmosDBProviderConfig,
};
use serde::Serialize;

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Check {
    /// The subject of the check, such as `container`, `partition key`, `index` or `batch 412`.
    pub subject: String,
    /// The status of the subject.
    pub status: CheckStatus,
    /// The observation, and the action to take if it is not right.
    pub detail: String,
}

/// The status of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub enum CheckStatus {
    /// The check succeeded.
    Ok,
    /// It works, but has a cost.
    Warning,
    /// The provider can't be used.
    Failed,
    /// Cosmos DB behaves differently from the provider's assumption.
    Differs,
    /// The check could not find out.
    Unknown,
}

pub(crate) async fn run(config: &CosmosDBProviderConfig, depth: CheckDepth) -> Vec<Check> {
    let subject = "configuration".to_owned();
    if let Err(error) = config.validate() {
        return vec![Check { subject, status: CheckStatus::Failed, detail: error.to_string() }];
    }
    let endpoint = config.endpoint().unwrap_or_default();
    let detail = format!(
        "{endpoint}, database {}, container {}, signing in with {}",
        config.database(),
        config.container(),
        config.credential_kind()
    );
    let mut checks = vec![Check { subject, status: CheckStatus::Ok, detail }];
    checks.extend(cosmos::check_account(config, depth).await.into_iter().map(|(subject, line)| {
        let (status, detail) = match line {
            CheckLine::Ok(detail) => (CheckStatus::Ok, detail),
            CheckLine::Warning(detail) => (CheckStatus::Warning, detail),
            CheckLine::Failed(detail) => (CheckStatus::Failed, detail),
            CheckLine::Differs(detail) => (CheckStatus::Differs, detail),
            CheckLine::Unknown(detail) => (CheckStatus::Unknown, detail),
        };
        Check { subject, status, detail }
    }));
    checks
}
