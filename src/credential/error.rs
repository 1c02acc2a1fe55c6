//! What can be wrong with a configuration.
//!
//! Messages name settings and variables, never their values: a key pasted into the wrong variable must not end up in
//! a log. The exceptions are an endpoint's scheme and host, and the ids (tenant, client) of an identity.

/// A configuration that can't be used, and what to change.
///
/// No message and no `Debug` output contains a key, a secret or a connection string.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A setting has a value that can't be used.
    #[error("{setting} {problem}")]
    Invalid {
        /// The setting, with its environment variable where there is one.
        setting: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// Something that is needed was not given.
    #[error("{} not set: {remedy}", listed(.settings))]
    Missing {
        /// The settings or variables that are missing.
        settings: Vec<&'static str>,
        /// What to do about it.
        remedy: String,
    },
    /// Settings that can't both be meant.
    #[error("{} contradict each other: {remedy}", listed(.settings))]
    Contradiction {
        /// All settings or variables involved.
        settings: Vec<&'static str>,
        /// What to do about it.
        remedy: String,
    },
    /// An account key was asked for in a build that signs in with Entra ID only.
    #[error(
        "{setting} asks for an account key, and this build signs in with Entra ID only: unset it, or enable the cargo \
         feature `key_auth` of duroxide-cosmos"
    )]
    KeyAuthDisabled {
        /// The setting or variable that asks for a key.
        setting: &'static str,
    },
    /// The identity library refused the credential's settings.
    #[error("the credential \"{kind}\" can't be set up: {reason}")]
    Credential {
        /// The kind of credential, as [`Credential::kind`](crate::Credential::kind) names it.
        kind: String,
        /// What the identity library said.
        reason: String,
    },
    /// Several of the above, so that they can be put right in one go.
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
    /// Keeps the value, or remembers what was wrong.
    pub(crate) fn keep<T>(&mut self, result: Result<T, ConfigError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(problem) => {
                self.0.push(problem);
                None
            }
        }
    }

    /// Remembers a problem with `setting` unless `fine`.
    pub(crate) fn require(&mut self, fine: bool, setting: &'static str, problem: &str) {
        if !fine {
            self.0.push(ConfigError::invalid(setting, problem));
        }
    }

    /// Nothing, the one problem, or all of them as one error.
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
    fn one_problem_stands_alone_and_several_are_one_error() {
        assert_eq!(Problems::default().into_result(), Ok(()));

        let mut one = Problems::default();
        one.require(false, "database", "is empty");
        one.require(true, "container", "is empty");
        assert_eq!(one.into_result(), Err(ConfigError::invalid("database", "is empty")));

        let mut two = Problems::default();
        two.require(false, "database", "is empty");
        assert_eq!(two.keep::<()>(Err(ConfigError::missing(vec!["A", "B", "C"], "set them"))), None);
        let error = two.into_result().unwrap_err();
        assert_eq!(
            error.to_string(),
            "2 problems in the configuration: (1) database is empty; (2) A, B and C not set: set them"
        );
    }
}
