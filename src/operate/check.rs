//! Whether an account can be used: what opening looks at, and every assumption about the service, one line each.

use crate::{
    store::checkup::{self, Depth, Line},
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
    pub verdict: Verdict,
    /// What was found, and what to do where that is not right.
    pub detail: String,
}

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub enum Verdict {
    /// As it must be.
    Fine,
    /// It works, but costs something.
    Poor,
    /// The provider can't be used.
    Wrong,
    /// The service behaves otherwise than the provider assumes.
    Differs,
    /// It can't be seen from here.
    Unknown,
}

pub(super) async fn run(config: &CosmosDBProviderConfig, depth: Depth) -> Vec<Check> {
    let subject = "configuration".to_owned();
    if let Err(error) = config.validate() {
        return vec![Check { subject, verdict: Verdict::Wrong, detail: error.to_string() }];
    }
    let endpoint = config.endpoint().unwrap_or_default();
    let detail = format!(
        "{endpoint}, database {}, container {}, signing in with {}",
        config.database(),
        config.container(),
        config.credential_kind()
    );
    let mut checks = vec![Check { subject, verdict: Verdict::Fine, detail }];
    checks.extend(checkup::run(config, depth).await.into_iter().map(|(subject, line)| {
        let (verdict, detail) = match line {
            Line::Fine(detail) => (Verdict::Fine, detail),
            Line::Poor(detail) => (Verdict::Poor, detail),
            Line::Wrong(detail) => (Verdict::Wrong, detail),
            Line::Differs(detail) => (Verdict::Differs, detail),
            Line::Unknown(detail) => (Verdict::Unknown, detail),
        };
        Check { subject, verdict, detail }
    }));
    checks
}
