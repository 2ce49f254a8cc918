//! Where a key comes from: a file or an open descriptor, never an argument.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use dormouse_storage::ImageKey;
use zeroize::Zeroizing;

use super::KeyArguments;
use crate::error::{Code, Failure};

/// Longer than any key, so that a wrong file is told and not read to its end.
const LONGEST: u64 = 256;

impl KeyArguments {
    /// Reads the key, if there is to be one.
    pub fn read(&self) -> Result<Option<ImageKey>, Failure> {
        let path = match (&self.key_file, self.key_fd) {
            (Some(path), _) => path.clone(),
            (None, Some(descriptor)) => PathBuf::from(format!("/proc/self/fd/{descriptor}")),
            (None, None) => return Ok(None),
        };
        let failed = |why: String| Failure::new(Code::Usage, format!("the key in {}: {why}", path.display()));
        let mut content = Zeroizing::new(Vec::with_capacity(LONGEST as usize));
        File::open(&path)
            .and_then(|file| file.take(LONGEST).read_to_end(&mut content))
            .map_err(|error| failed(error.to_string()))?;
        let key = ImageKey::from_file_content(&content).map_err(|error| failed(error.to_string()))?;
        Ok(Some(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_from_a_file_and_a_wrong_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let arguments = |key_file| KeyArguments {
            key_file,
            key_fd: None,
        };
        assert_eq!(arguments(None).read(), Ok(None));
        std::fs::write(&path, [7; 32]).unwrap();
        let key = ImageKey::from_file_content(&[7; 32]).unwrap();
        assert_eq!(arguments(Some(path.clone())).read(), Ok(Some(key)));
        std::fs::write(&path, "secret password").unwrap();
        let failure = arguments(Some(path.clone())).read().unwrap_err();
        assert_eq!(failure.code, Code::Usage);
        assert!(failure.message.contains(path.to_str().unwrap()), "{failure}");
        assert!(!failure.message.contains("secret"), "{failure}");
    }
}
