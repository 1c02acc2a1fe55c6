//! Whether an account can be used: what opening looks at, and every assumption about the service, one line each.

use crate::{
    cosmos::check::{self, CheckLine, Depth},
    CosmosDBProviderConfig,
};
use serde::Serialize;

/// One thing that must be right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Check {
    /// What was looked at, such as `container`, `partition key`, `index` or `batch 412`.
    pub subject: String,
    /// How it is.
    pub status: CheckStatus,
    /// What was found, and what to do where that is not right.
    pub detail: String,
}

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub enum CheckStatus {
    /// As it must be.
    Ok,
    /// It activities, but costs something.
    Warning,
    /// The provider can't be used.
    Failed,
    /// The service behaves otherwise than the provider assumes.
    Differs,
    /// It can't be seen from here.
    Unknown,
}

pub(super) async fn run(config: &CosmosDBProviderConfig, depth: Depth) -> Vec<Check> {
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
    checks.extend(check::run(config, depth).await.into_iter().map(|(subject, line)| {
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
