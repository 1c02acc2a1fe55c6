//! Errors of a configuration.
//!
//! Messages name settings and variables, never their values, because a key in the wrong variable must not appear in a
//! log. The exceptions are the scheme and host of an endpoint, and the ids (tenant, client) of an identity.

/// A configuration that can't be used. The message says what to change.
///
/// ```
/// use duroxide_cosmos::{ConfigError, CosmosDBProviderConfig};
///
/// let error = CosmosDBProviderConfig::default().validate().unwrap_err();
/// assert!(matches!(error, ConfigError::Several(problems) if problems.len() == 2), "endpoint and credential");
/// ```
///
/// No message and no `Debug` output contains a key, a secret or a connection string.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The value of a setting can't be used.
    #[error("{setting} {problem}")]
    Invalid {
        /// The setting, with its environment variable where there is one.
        setting: &'static str,
        /// The problem with its value.
        problem: String,
    },
    /// A required setting is missing.
    #[error("{} not set: {remedy}", listed(.settings))]
    Missing {
        /// The settings or variables that are missing.
        settings: Vec<&'static str>,
        /// The steps to take.
        remedy: String,
    },
    /// Settings contradict each other.
    #[error("{} contradict each other: {remedy}", listed(.settings))]
    Contradiction {
        /// All settings or variables involved.
        settings: Vec<&'static str>,
        /// The steps to take.
        remedy: String,
    },
    /// A setting selects an account key in a build without the feature `key_auth`.
    #[error(
        "{setting} selects an account key, but this build supports only Entra ID: unset it, or enable the cargo feature \
         `key_auth` of duroxide-cosmos"
    )]
    KeyAuthDisabled {
        /// The setting or variable that selects a key.
        setting: &'static str,
    },
    /// The identity library refused the credential's settings.
    #[error("the credential \"{kind}\" can't be set up: {reason}")]
    Credential {
        /// The kind of credential, as [`Credential::kind`](crate::Credential::kind) names it.
        kind: String,
        /// The identity library's reason.
        reason: String,
    },
    /// Several problems, so that the user can correct all of them at once.
    #[error("{} problems in the configuration: {}", .0.len(), numbered(.0))]
    Several(Vec<ConfigError>),
}

impl ConfigError {
    pub(crate) fn invalid(setting: &'static str, problem: impl Into<String>) -> Self {
        Self::Invalid { setting, problem: problem.into() }
    }

    pub(crate) fn missing(settings: Vec<&'static str>, remedy: impl Into<String>) -> Self {
        Self::Missing { settings, remedy: remedy.into() }
    }

    pub(crate) fn contradiction(settings: Vec<&'static str>, remedy: impl Into<String>) -> Self {
        Self::Contradiction { settings, remedy: remedy.into() }
    }
}

/// Collects problems, so that a user sees all of them at once.
#[derive(Default)]
pub(crate) struct Problems(Vec<ConfigError>);

impl Problems {
    /// Returns the value, or records the error.
    pub(crate) fn collect<T>(&mut self, result: Result<T, ConfigError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(problem) => {
                self.0.push(problem);
                None
            }
        }
    }

    /// Records a problem with `setting` unless `valid`.
    pub(crate) fn require(&mut self, valid: bool, setting: &'static str, problem: &str) {
        if !valid {
            self.0.push(ConfigError::invalid(setting, problem));
        }
    }

    /// `Ok`, the only error, or all errors as one.
    pub(crate) fn into_result(mut self) -> Result<(), ConfigError> {
        match self.0.pop() {
            None => Ok(()),
            Some(only) if self.0.is_empty() => Err(only),
            Some(last) => {
                self.0.push(last);
                Err(ConfigError::Several(self.0))
            }
        }
    }
}

fn listed(settings: &[&'static str]) -> String {
    match settings {
        [] => String::new(),
        [only] => (*only).to_owned(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

fn numbered(problems: &[ConfigError]) -> String {
    let lines: Vec<String> =
        problems.iter().enumerate().map(|(index, problem)| format!("({}) {problem}", index + 1)).collect();
    lines.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_problem_is_one_error_and_so_are_several() {
        assert_eq!(Problems::default().into_result(), Ok(()));

        let mut one = Problems::default();
        one.require(false, "database", "is empty");
        one.require(true, "container", "is empty");
        assert_eq!(one.into_result(), Err(ConfigError::invalid("database", "is empty")));

        let mut two = Problems::default();
        two.require(false, "database", "is empty");
        assert_eq!(two.collect::<()>(Err(ConfigError::missing(vec!["A", "B", "C"], "set them"))), None);
        let error = two.into_result().unwrap_err();
        assert_eq!(
            error.to_string(),
            "2 problems in the configuration: (1) database is empty; (2) A, B and C not set: set them"
        );
    }
}
