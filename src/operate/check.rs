//! Whether an account can be used: what opening looks at, one line each, and nothing is made.

use crate::{
    store::checkup::{self, Line},
    CosmosDBProviderConfig,
};
use serde::Serialize;

/// One thing that must be right.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Check {
    /// What was looked at: `configuration`, `account`, `container`, `partition key`, `index`, `time to live`, `regions`, `format`, `role`.
    pub subject: &'static str,
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
}

pub(super) async fn run(config: &CosmosDBProviderConfig) -> Vec<Check> {
    if let Err(error) = config.validate() {
        return vec![Check { subject: "configuration", verdict: Verdict::Wrong, detail: error.to_string() }];
    }
    let endpoint = config.endpoint().unwrap_or_default();
    let detail = format!(
        "{endpoint}, database {}, container {}, signing in with {}",
        config.database(),
        config.container(),
        config.credential_kind()
    );
    let mut checks = vec![Check { subject: "configuration", verdict: Verdict::Fine, detail }];
    checks.extend(checkup::run(config).await.into_iter().map(|(subject, line)| {
        let (verdict, detail) = match line {
            Line::Fine(detail) => (Verdict::Fine, detail),
            Line::Poor(detail) => (Verdict::Poor, detail),
            Line::Wrong(detail) => (Verdict::Wrong, detail),
        };
        Check { subject, verdict, detail }
    }));
    checks
}
