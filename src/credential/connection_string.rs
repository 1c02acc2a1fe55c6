//! Connection strings in the notation of the Azure portal: `AccountEndpoint=…;AccountKey=…`.

use std::str::FromStr;

use azure_core::{credentials::Secret, http::Url};

use super::{endpoint, ConfigError};

const SETTING: &str = "the connection string (COSMOS_CONNECTION_STRING)";

/// An account's endpoint and key, parsed from a connection string.
///
/// ```
/// use duroxide_cosmos::ConnectionString;
///
/// let parsed: ConnectionString =
///     "AccountEndpoint=https://myaccount.documents.azure.com:443/;AccountKey=a2V5;".parse()?;
/// assert_eq!(parsed.endpoint(), "https://myaccount.documents.azure.com/");
/// assert!(!format!("{parsed:?}").contains("a2V5"));
/// # Ok::<(), duroxide_cosmos::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionString {
    endpoint: Url,
    key: Secret,
}

impl ConnectionString {
    /// The account's endpoint.
    pub fn endpoint(&self) -> &str {
        self.endpoint.as_str()
    }

    pub(super) fn key(&self) -> &Secret {
        &self.key
    }
}

impl FromStr for ConnectionString {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (mut endpoint, mut key) = (None, None);
        for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
            let Some((name, value)) = part.split_once('=') else {
                return Err(invalid("has a part that is not NAME=VALUE"));
            };
            let value_of_part = match name.trim().to_ascii_lowercase().as_str() {
                "accountendpoint" => &mut endpoint,
                "accountkey" => &mut key,
                // Portals and tools add other parts, such as `Database=`. They don't concern the account.
                _ => continue,
            };
            if value_of_part.replace(value.trim()).is_some() {
                return Err(invalid("names AccountEndpoint or AccountKey twice"));
            }
        }
        let endpoint = endpoint.filter(|value| !value.is_empty());
        let key = key.filter(|value| !value.is_empty());
        let endpoint = endpoint.ok_or_else(|| invalid("has no AccountEndpoint=https://…"))?;
        let key = key.ok_or_else(|| invalid("has no AccountKey=…"))?;
        Ok(Self {
            endpoint: endpoint::parse(endpoint)
                .map_err(|_| invalid("has an AccountEndpoint that is not an https account endpoint"))?,
            key: Secret::new(key.to_owned()),
        })
    }
}

fn invalid(problem: &str) -> ConfigError {
    ConfigError::invalid(SETTING, format!("{problem}; copy it again from the account's keys page"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        text.parse::<ConnectionString>().unwrap_err().to_string()
    }

    #[test]
    fn endpoint_and_key_are_found_in_any_order_and_case() {
        for text in [
            "AccountEndpoint=https://acc.documents.azure.com:443/;AccountKey=a2V5PT0=;",
            "accountkey=a2V5PT0=;ACCOUNTENDPOINT=https://acc.documents.azure.com/",
            " AccountEndpoint = https://acc.documents.azure.com ; AccountKey = a2V5PT0= ;Database=x;",
        ] {
            let parsed: ConnectionString = text.parse().unwrap();
            assert_eq!(parsed.endpoint(), "https://acc.documents.azure.com/");
            assert_eq!(parsed.key().secret(), "a2V5PT0=");
        }
    }

    #[test]
    fn bad_forms_are_refused_with_the_reason() {
        let endpoint = "AccountEndpoint=https://acc.documents.azure.com/";
        assert!(problem("").contains("no AccountEndpoint"));
        assert!(problem("AccountKey=a2V5").contains("no AccountEndpoint"));
        assert!(problem("AccountEndpoint=;AccountKey=a2V5").contains("no AccountEndpoint"));
        assert!(problem(endpoint).contains("no AccountKey"));
        assert!(problem(&format!("{endpoint};AccountKey=")).contains("no AccountKey"));
        assert!(problem(&format!("{endpoint};a2V5")).contains("not NAME=VALUE"));
        assert!(problem(&format!("{endpoint};AccountKey=a2V5;AccountKey=b")).contains("twice"));
        assert!(problem("AccountEndpoint=http://acc.documents.azure.com/;AccountKey=a").contains("https"));
        assert!(problem("AccountEndpoint=acc;AccountKey=a").contains("https"));
    }

    #[test]
    fn neither_debug_nor_errors_show_the_key() {
        let parsed: ConnectionString =
            "AccountEndpoint=https://a.documents.azure.com/;AccountKey=c2VjcmV0".parse().unwrap();
        assert!(!format!("{parsed:?}").contains("c2VjcmV0"));
        for text in [
            "AccountKey=c2VjcmV0",
            "AccountEndpoint=https://a/;c2VjcmV0",
            "AccountEndpoint=c2VjcmV0;AccountKey=c2VjcmV0",
        ] {
            let error = text.parse::<ConnectionString>().unwrap_err();
            assert!(!error.to_string().contains("c2VjcmV0"));
            assert!(!format!("{error:?}").contains("c2VjcmV0"));
        }
    }
}
